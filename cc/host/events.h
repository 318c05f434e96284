// What the library records and can be told to do while it runs: a timeline of phases, and injected faults.
//
// Contract: recording is off until start() and costs one relaxed load when off. Faults exist for tests only:
// they are set through the API by ring name, rank and phase, never by an environment variable, and cost one
// relaxed load when none is set.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "host/status.h"

namespace streammoe {

// Phases of a call, in the order a chunk sees them. Names are what trace files and error texts print.
enum class Phase : int32_t {
  kOpen = 0,
  kPublishRoute,
  kPublishLayout,
  kDispatch,
  kExperts,
  kDone,
  kCombine,
  kClose,
  kBackward,
};
const char* phase_name(Phase phase);
// Phase of that name, or -1.
int32_t phase_of(const std::string& name);

struct Event {
  std::string ring;
  int64_t group = 0, rank = 0;
  Phase phase = Phase::kOpen;
  int64_t chunk = -1;  // first chunk the event is about, -1 when it is about the call
  int64_t last_chunk = -1;
  double begin_s = 0, end_s = 0;  // steady clock
};

class Timeline {
 public:
  static Timeline& get();
  void start();
  std::vector<Event> stop();
  bool on() const { return on_.load(std::memory_order_relaxed); }
  void add(Event event);

 private:
  std::atomic<bool> on_{false};
  std::mutex mutex_;
  std::vector<Event> events_;
};

double now_s();

// Records one phase from construction to destruction.
class Span {
 public:
  Span(const std::string& ring, int64_t group, int64_t rank, Phase phase, int64_t chunk = -1, int64_t last_chunk = -1);
  ~Span();
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;

 private:
  bool on_;
  Event event_;
};

enum class FaultKind : int32_t {
  kDelay = 0,   // sleep for `seconds`
  kJitter = 1,  // sleep for a random part of `seconds`
  kFail = 2,    // report an error, as a failing handler would: peers are told
  kDrop = 3,    // die silently: peers learn of it from their deadline
};

struct Fault {
  std::string ring;
  int64_t rank = -1;  // -1: every rank
  Phase phase = Phase::kOpen;
  FaultKind kind = FaultKind::kDelay;
  double seconds = 0;
};

class Faults {
 public:
  static Faults& get();
  void add(Fault fault);
  void clear();
  // Applies every matching fault. A failed status means: this rank stops here. `silent` says whether peers may
  // be told.
  Status hit(const std::string& ring, int64_t rank, Phase phase, bool* silent);

 private:
  std::atomic<bool> any_{false};
  std::mutex mutex_;
  std::vector<Fault> faults_;
  std::minstd_rand random_{12345};
};

}  // namespace streammoe
