// Timeline and fault table. See events.h for the contract.
#include "host/events.h"

#include <thread>

namespace streammoe {
namespace {
constexpr const char* kPhaseNames[] = {"open", "publish_route", "publish_layout", "dispatch", "experts",
                                       "done", "combine",       "close",          "backward"};
}  // namespace

const char* phase_name(Phase phase) { return kPhaseNames[static_cast<int32_t>(phase)]; }

int32_t phase_of(const std::string& name) {
  for (int32_t i = 0; i < static_cast<int32_t>(std::size(kPhaseNames)); ++i) {
    if (name == kPhaseNames[i]) return i;
  }
  return -1;
}

double now_s() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

Timeline& Timeline::get() {
  static Timeline timeline;
  return timeline;
}

void Timeline::start() {
  std::lock_guard lock(mutex_);
  events_.clear();
  on_.store(true, std::memory_order_relaxed);
}

std::vector<Event> Timeline::stop() {
  std::lock_guard lock(mutex_);
  on_.store(false, std::memory_order_relaxed);
  return std::move(events_);
}

void Timeline::add(Event event) {
  std::lock_guard lock(mutex_);
  if (on()) events_.push_back(std::move(event));
}

Span::Span(const std::string& ring, int64_t group, int64_t rank, Phase phase, int64_t chunk, int64_t last_chunk)
    : on_(Timeline::get().on()) {
  if (on_) event_ = {ring, group, rank, phase, chunk, last_chunk < 0 ? chunk : last_chunk, now_s(), 0};
}

Span::~Span() {
  if (!on_) return;
  event_.end_s = now_s();
  Timeline::get().add(std::move(event_));
}

Faults& Faults::get() {
  static Faults faults;
  return faults;
}

void Faults::add(Fault fault) {
  std::lock_guard lock(mutex_);
  faults_.push_back(std::move(fault));
  any_.store(true, std::memory_order_relaxed);
}

void Faults::clear() {
  std::lock_guard lock(mutex_);
  faults_.clear();
  any_.store(false, std::memory_order_relaxed);
}

Status Faults::hit(const std::string& ring, int64_t rank, Phase phase, bool* silent) {
  if (!any_.load(std::memory_order_relaxed)) return {};
  double sleep_s = 0;
  Status status;
  {
    std::lock_guard lock(mutex_);
    for (const Fault& f : faults_) {
      if (f.ring != ring || f.phase != phase || (f.rank >= 0 && f.rank != rank)) continue;
      if (f.kind == FaultKind::kDelay) sleep_s += f.seconds;
      if (f.kind == FaultKind::kJitter) sleep_s += std::uniform_real_distribution<double>(0, f.seconds)(random_);
      if (f.kind == FaultKind::kFail || f.kind == FaultKind::kDrop) {
        *silent = f.kind == FaultKind::kDrop;
        status = error(Code::kAborted, "injected fault: rank ", rank, " of ring '", ring, "' stops in phase ",
                       phase_name(phase));
      }
    }
  }
  if (sleep_s > 0) std::this_thread::sleep_for(std::chrono::duration<double>(sleep_s));
  return status;
}

}  // namespace streammoe
