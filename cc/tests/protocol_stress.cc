// The ring's protocol under threads, random delays, failures and deadlines; meant to run under -fsanitize=thread.
//
// Contract: a plain main() that prints every broken promise and exits with 1. Ranks are threads over heaps from
// malloc. `words` uses cc/protocol alone: a small harness that publishes, waits, acknowledges and seals as
// cc/cpu/stream*.cc do. `streams` runs the real Ring and Stream. Payload is a function of rank, call and token, so a
// stale slot or row cannot go unseen. Trade-off: tiny layers, because the races are in the hand-shakes.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cpu/combine.h"
#include "cpu/experts.h"
#include "cpu/stream.h"
#include "host/events.h"
#include "host/registry.h"
#include "protocol/descriptor.h"
#include "protocol/ring.h"
#include "protocol/sequence.h"

namespace streammoe {
namespace {

std::atomic<int> failures{0};

#define EXPECT(condition, ...)                                 \
  do {                                                         \
    if (!(condition) && failures.fetch_add(1) < 40) {          \
      std::printf("FAIL line %d: %s: ", __LINE__, #condition); \
      std::printf(__VA_ARGS__);                                \
      std::printf("\n");                                       \
    }                                                          \
  } while (false)

struct Heaps {
  Heaps(int64_t ranks, int64_t bytes) {
    for (int64_t r = 0; r < ranks; ++r) {
      base.push_back(static_cast<uint8_t*>(std::aligned_alloc(kLineBytes, static_cast<size_t>(align_line(bytes)))));
      std::memset(base.back(), 0xcd, static_cast<size_t>(bytes));
    }
  }
  ~Heaps() {
    for (uint8_t* p : base) std::free(p);
  }
  // What make_ring's registering call does.
  void clear(const RingLayout& at) {
    for (uint8_t* p : base) {
      std::memset(p, 0, static_cast<size_t>(at.slots));
      reinterpret_cast<RingHeader*>(p + at.header)->magic = kRingMagic;
    }
  }
  std::vector<uint8_t*> base;
};

void maybe_sleep(std::minstd_rand& random) {
  if (random() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 120));
}

void on_ranks(int64_t ranks, const std::function<void(int64_t)>& body) {
  std::vector<std::thread> threads;
  for (int64_t r = 0; r < ranks; ++r) threads.emplace_back(body, r);
  for (std::thread& t : threads) t.join();
}

// ---- words: cc/protocol alone ---------------------------------------------------------------------------------

uint32_t payload(int64_t rank, uint64_t q, int64_t i) {
  return static_cast<uint32_t>(mix_tag(mix_tag(static_cast<uint64_t>(rank), q), static_cast<uint64_t>(i)));
}

struct WordRank {
  const RingShape& shape;
  const RingLayout& at;
  const std::vector<uint8_t*>& base;
  int64_t rank;

  uint64_t* word(int64_t of, int64_t offset) const {
    return reinterpret_cast<uint64_t*>(base[static_cast<size_t>(of)] + offset);
  }
  void wait(const uint64_t* w, uint64_t wanted) const {
    const AbortWords aborts{base[static_cast<size_t>(rank)] + at.abort, shape.num_ranks};
    const WaitResult got = wait_at_least(w, wanted, aborts, Clock::now() + std::chrono::seconds(60));
    EXPECT(got.status == WaitStatus::kReached, "rank %ld wanted %lu, saw %lu", (long)rank, (unsigned long)wanted,
           (unsigned long)got.seen);
  }

  void publish(uint64_t q, bool route) const {
    const int64_t slot = sequence_slot(q, shape.num_slots);
    for (int64_t r = 0; r < shape.num_ranks; ++r) {
      wait(word(rank, at.word(at.consumed, r, slot, shape.num_slots)), reuse_sequence(q, shape.num_slots));
    }
    uint8_t* mine = base[static_cast<size_t>(rank)] + at.slot(slot);
    const int64_t n = shape.chunk_tokens * (route ? shape.top_k : shape.hidden);
    auto* out = reinterpret_cast<uint32_t*>(mine + (route ? at.slot_topk_ids : at.slot_x));
    for (int64_t i = 0; i < n; ++i) out[i] = payload(rank, q, route ? -i : i);
    auto* d = reinterpret_cast<SlotDescriptor*>(mine + (route ? at.slot_route_descriptor : at.slot_layout_descriptor));
    *d = {q, 0, 7, 0, 0, n};
    for (int64_t r = 0; r < shape.num_ranks; ++r) {
      store_release(word(r, at.word(route ? at.route_ready : at.layout_ready, rank, slot, shape.num_slots)), q);
    }
  }

  // Reads the chunk of every rank, writes one row back to each owner, and acknowledges.
  void consume(uint64_t q, int64_t chunk) const {
    const int64_t slot = sequence_slot(q, shape.num_slots);
    for (int64_t i = 0; i < shape.num_ranks; ++i) {
      const int64_t peer = (rank + i) % shape.num_ranks;
      const uint8_t* theirs = base[static_cast<size_t>(peer)] + at.slot(slot);
      for (const bool route : {true, false}) {
        wait(word(rank, at.word(route ? at.route_ready : at.layout_ready, peer, slot, shape.num_slots)), q);
        SlotDescriptor d;
        std::memcpy(&d, theirs + (route ? at.slot_route_descriptor : at.slot_layout_descriptor), sizeof d);
        EXPECT(d.sequence == q && d.tag == 7, "rank %ld reads %ld: sequence %lu, want %lu", (long)rank, (long)peer,
               (unsigned long)d.sequence, (unsigned long)q);
        const auto* in = reinterpret_cast<const uint32_t*>(theirs + (route ? at.slot_topk_ids : at.slot_x));
        for (int64_t j = 0; j < d.num_tokens; ++j) {
          const uint32_t want = payload(peer, q, route ? -j : j);
          EXPECT(in[j] == want, "stale: rank %ld reads %ld, q %lu, element %ld", (long)rank, (long)peer,
                 (unsigned long)q, (long)j);
        }
      }
      store_release(word(peer, at.word(at.consumed, rank, slot, shape.num_slots)), q);
      // One combine row per (chunk, reader): K = R of them fit a token.
      auto* row = word(peer, at.combine_rows) + (chunk * shape.num_ranks + rank);
      *row = mix_tag(q, static_cast<uint64_t>(rank));
    }
  }

  void seal(uint64_t number) const {
    for (int64_t r = 0; r < shape.num_ranks; ++r) store_release(word(r, at.word(at.done, rank, 0, 1)), number);
    for (int64_t r = 0; r < shape.num_ranks; ++r) wait(word(rank, at.word(at.done, r, 0, 1)), number);
  }
};

void words(int64_t ranks, int64_t slots, bool overlap, int calls) {
  const int64_t chunks = 2 * slots + 1;  // slots are used again inside a call
  const RingShape shape{ranks, slots, 3, 8, ranks, 4, ranks * slots * 3};
  const RingLayout at = make_ring_layout(shape);
  Heaps heaps(ranks, at.total);
  heaps.clear(at);
  on_ranks(ranks, [&](int64_t rank) {
    const WordRank me{shape, at, heaps.base, rank};
    std::minstd_rand random(static_cast<unsigned>(17 * rank + slots));
    for (int call = 0; call < calls; ++call) {
      const uint64_t base = static_cast<uint64_t>(call * chunks);
      const auto consume = [&, seed = random()] {
        std::minstd_rand mine(seed + 1);
        for (int64_t chunk = 0; chunk < chunks; ++chunk) {
          maybe_sleep(mine);
          me.consume(chunk_sequence(base, chunk), chunk);
        }
      };
      std::thread worker;
      if (overlap) worker = std::thread(consume);
      std::vector<int64_t> order;  // any order inside what the ring holds at once
      for (int64_t chunk = 0; chunk < chunks; ++chunk) order.push_back(chunk);
      for (int64_t at_chunk = 0; overlap && at_chunk < chunks; at_chunk += slots) {
        std::shuffle(order.begin() + at_chunk, order.begin() + std::min(at_chunk + slots, chunks), random);
      }
      for (const int64_t chunk : order) {
        const bool route_first = random() % 2 == 0;
        for (const bool route : {route_first, !route_first}) {
          maybe_sleep(random);
          me.publish(chunk_sequence(base, chunk), route);
        }
        if (!overlap) me.consume(chunk_sequence(base, chunk), chunk);
      }
      if (overlap) worker.join();
      me.seal(static_cast<uint64_t>(call) + 1);
      for (int64_t i = 0; i < chunks * ranks; ++i) {
        const uint64_t want = mix_tag(chunk_sequence(base, i / ranks), static_cast<uint64_t>(i % ranks));
        EXPECT(me.word(rank, at.combine_rows)[i] == want, "rank %ld call %d: stale combine row %ld", (long)rank, call,
               (long)i);
      }
    }
  });
}

// ---- streams: Ring and Stream -----------------------------------------------------------------------------------

constexpr int64_t kHidden = 8, kInner = 8, kTopK = 2, kLocal = 2, kChunk = 4, kBlock = 8;

struct Layer {
  int64_t ranks;
  std::vector<float> gate_up, down;  // of all experts
  ExpertProblem problem;

  explicit Layer(int64_t num_ranks) : ranks(num_ranks) {
    std::minstd_rand random(3);
    std::uniform_real_distribution<float> draw(-1, 1);
    gate_up.resize(static_cast<size_t>(ranks * kLocal * kHidden * 2 * kInner));
    down.resize(static_cast<size_t>(ranks * kLocal * kInner * kHidden));
    for (float& w : gate_up) w = draw(random);
    for (float& w : down) w = draw(random);
    problem.num_experts = kLocal, problem.hidden = kHidden, problem.intermediate = kInner, problem.top_k = kTopK;
    problem.block_m = kBlock, problem.threads = 1;
  }
  ExpertWeights weights(int64_t first_expert) const {
    ExpertWeights w;
    const float* g = gate_up.data() + first_expert * kHidden * 2 * kInner;
    w.gate = {g, kHidden * 2 * kInner, 2 * kInner};
    w.up = {g + kInner, kHidden * 2 * kInner, 2 * kInner};
    w.down = {down.data() + first_expert * kInner * kHidden, kInner * kHidden, kHidden};
    return w;
  }
};

struct Tokens {
  std::vector<float> x, weights;
  std::vector<int32_t> ids;
};

Tokens tokens_of(int64_t rank, int call, int64_t num_tokens, int64_t experts) {
  std::minstd_rand random(static_cast<unsigned>(1 + rank * 1000 + call));
  std::uniform_real_distribution<float> draw(-1, 1);
  Tokens t;
  for (int64_t i = 0; i < num_tokens * kHidden; ++i) t.x.push_back(draw(random));
  for (int64_t i = 0; i < num_tokens * kTopK; ++i) {
    t.weights.push_back(draw(random));
    t.ids.push_back(static_cast<int32_t>(random() % static_cast<unsigned>(experts + 1)) - 1);
  }
  return t;
}

// One block per row: what a row is does not depend on its block.
std::vector<float> expected(const Layer& layer, const Tokens& t, int64_t num_tokens) {
  std::vector<float> rows(static_cast<size_t>(num_tokens * kTopK * kHidden)),
      y(static_cast<size_t>(num_tokens * kHidden));
  ExpertProblem all = layer.problem;
  all.num_experts = layer.ranks * kLocal;
  std::vector<cpu::RowTask> tasks;
  std::vector<cpu::ExpertBlock> blocks;
  for (int64_t pair = 0; pair < num_tokens * kTopK; ++pair) {
    if (t.ids[static_cast<size_t>(pair)] < 0) continue;
    blocks.push_back({t.ids[static_cast<size_t>(pair)], static_cast<int64_t>(tasks.size()), 1});
    tasks.push_back({t.x.data() + pair / kTopK * kHidden, rows.data() + pair * kHidden});
  }
  cpu::run_expert_blocks(all, layer.weights(0), blocks, tasks.data());
  cpu::combine(DType::kF32, kHidden, kTopK, num_tokens, rows.data(), t.ids.data(), t.weights.data(), nullptr, y.data(),
               1);
  return y;
}

CallSpec call_spec(const Layer& layer, int64_t num_tokens, int64_t slots, bool overlap, bool packed,
                   int64_t chunk_tokens = kChunk) {
  CallSpec spec;
  spec.problem = layer.problem;
  spec.num_tokens = num_tokens, spec.chunk_tokens = chunk_tokens;
  spec.macro_tokens = std::min(num_tokens, slots * kChunk);
  for (int64_t start = 0; start < num_tokens; start += spec.macro_tokens) {
    const int64_t chunks = (std::min(spec.macro_tokens, num_tokens - start) + chunk_tokens - 1) / chunk_tokens;
    for (int64_t chunk = 1; chunk <= chunks; ++chunk) {
      if (!packed || slots == 1 || chunk % 2 == 0 || chunk == chunks) spec.wave_ends.push_back(spec.num_chunks + chunk);
    }
    spec.num_chunks += chunks;
    spec.macro_ends.push_back(spec.num_chunks);
  }
  spec.min_carry_rows = kBlock, spec.packed = packed, spec.overlap = overlap;
  return spec;
}

struct World {
  Layer layer;
  RingShape shape;
  RingLayout at;
  Heaps heaps;
  std::unique_ptr<Ring> ring;

  World(int64_t ranks, int64_t slots)
      : layer(ranks),
        shape{ranks, slots, kChunk, kHidden, kTopK, 4, ranks * kChunk},
        at(make_ring_layout(shape)),
        heaps(ranks, at.total) {}
  void make(double timeout_s) {
    ring = std::make_unique<Ring>("stress", shape, 1, timeout_s, [](Ring* r, int64_t group, int64_t rank) {
      return std::make_shared<cpu::Stream>(r, group, rank);
    });
    heaps.clear(at);
    for (int64_t r = 0; r < shape.num_ranks; ++r) {
      ring->add_member(r, 0, r);
      ring->set_base(0, r, heaps.base[static_cast<size_t>(r)]);
    }
  }
  // One rank's call, as the handlers make it. y is checked when it succeeds.
  Status call(int64_t rank, int number, const CallSpec& spec, std::minstd_rand& random) {
    auto& stream = static_cast<cpu::Stream&>(*ring->find_member(rank)->stream);
    const Tokens t = tokens_of(rank, number, spec.num_tokens, layer.ranks * kLocal);
    std::vector<float> y(static_cast<size_t>(spec.num_tokens * kHidden), -7.f);
    CallStats stats;
    const auto run = [&]() -> Status {
      STREAMMOE_RETURN_IF_ERROR(stream.open(spec, layer.weights(rank * kLocal)));
      for (int64_t chunk = 0; chunk < spec.num_chunks; ++chunk) {
        const int64_t start = spec.chunk_bounds(chunk).first;
        const bool route_first = random() % 2 == 0;
        for (const bool route : {route_first, !route_first}) {
          if (route) {
            STREAMMOE_RETURN_IF_ERROR(
                stream.publish_route(chunk, t.ids.data() + start * kTopK, t.weights.data() + start * kTopK, y.data()));
          } else {
            STREAMMOE_RETURN_IF_ERROR(stream.publish_layout(chunk, t.x.data() + start * kHidden, y.data()));
          }
        }
      }
      return stream.close(layer.weights(rank * kLocal), y.data(), &stats);
    };
    const Status status = run();
    if (!status.ok()) {
      stream.abort(status);
      return status;
    }
    const std::vector<float> want = expected(layer, t, spec.num_tokens);
    EXPECT(std::memcmp(want.data(), y.data(), want.size() * 4) == 0, "rank %ld of %ld, call %d: wrong bits", (long)rank,
           (long)layer.ranks, number);
    return status;
  }
};

void streams(int64_t ranks, int64_t slots, bool overlap, bool packed, int calls) {
  World world(ranks, slots);
  world.make(60);
  for (int phase = 0; phase <= static_cast<int>(Phase::kClose); ++phase) {
    Faults::get().add({"stress", -1, static_cast<Phase>(phase), FaultKind::kJitter, 1e-4});
  }
  on_ranks(ranks, [&](int64_t rank) {
    std::minstd_rand random(static_cast<unsigned>(rank + 5));
    for (int n = 0; n < calls; ++n) {
      const auto spec = call_spec(world.layer, 1 + n * 5 % (3 * slots * kChunk), slots, overlap, packed, n % 3 + 2);
      const Status status = world.call(rank, n, spec, random);
      EXPECT(status.ok(), "rank %ld call %d: %s", (long)rank, n, status.message().c_str());
    }
  });
  Faults::get().clear();
}

// A rank that fails or goes silent in `phase`: everyone ends in time, with the reason, and the next ring works.
void broken(int64_t ranks, bool overlap, Phase phase, FaultKind kind) {
  const int64_t slots = 2, victim = ranks - 1;
  const double timeout_s = kind == FaultKind::kDrop ? 0.25 : 60;
  World world(ranks, slots);
  const auto spec = call_spec(world.layer, 13, slots, overlap, true);
  const auto round = [&](int number, std::vector<Status>* out) {
    on_ranks(ranks, [&](int64_t rank) {
      std::minstd_rand random(static_cast<unsigned>(rank + 1));
      (*out)[static_cast<size_t>(rank)] = world.call(rank, number, spec, random);
    });
  };
  world.make(timeout_s);
  std::vector<Status> status(static_cast<size_t>(ranks));
  Faults::get().add({"stress", victim, phase, kind, 0});
  const double begin = now_s();
  round(0, &status);
  const double seconds = now_s() - begin;
  Faults::get().clear();
  const std::string injected = "injected fault: rank " + std::to_string(victim);
  const std::string missed = "for rank " + std::to_string(victim) + " in phase";
  EXPECT(seconds < 20, "%s: took %.1f s", phase_name(phase), seconds);
  EXPECT(status[static_cast<size_t>(victim)].message().find(injected) == 0, "victim: %s",
         status[static_cast<size_t>(victim)].message().c_str());
  for (int64_t r = 0; r < victim; ++r) {
    const std::string& text = status[static_cast<size_t>(r)].message();
    const bool late = phase == Phase::kCombine || phase == Phase::kClose;  // peers may be through by then
    const bool named = text.find(kind == FaultKind::kDrop ? missed : injected) != std::string::npos;
    EXPECT(named || (late && text.empty()), "%s, rank %ld: '%s'", phase_name(phase), (long)r, text.c_str());
  }
  EXPECT(world.ring->failed() && !world.ring->failure().empty(), "%s: the ring is not terminal", phase_name(phase));
  world.make(60);  // the same memory, another life
  for (int n = 1; n < 3; ++n) {
    round(n, &status);
    for (const Status& s : status) EXPECT(s.ok(), "after make_ring: %s", s.message().c_str());
  }
}

void different_plans() {
  World world(2, 2);
  world.make(20);
  on_ranks(2, [&](int64_t rank) {
    std::minstd_rand random(1);
    const Status status = world.call(rank, 0, call_spec(world.layer, rank == 0 ? 7 : 8, 2, false, true), random);
    EXPECT(status.message().find("disagree about the") != std::string::npos, "rank %ld: '%s'", (long)rank,
           status.message().c_str());
  });
}

void inconsistent_plans() {
  World world(2, 2);
  world.make(20);
  const CallSpec good = call_spec(world.layer, 13, 2, false, true);
  EXPECT(good.check(world.shape).ok(), "%s", good.check(world.shape).message().c_str());
  struct Case {
    const char* text;
    std::function<void(CallSpec&)> change;
  };
  const std::vector<Case> cases = {
      {"macro_tokens must be", [](auto& s) { s.macro_tokens = 2 * kChunk + 1; }},
      {"macro_tokens must be", [](auto& s) { s.macro_tokens = 0; }},
      {"macro_tokens must be", [](auto& s) { s.num_tokens = -1; }},
      {"chunk_tokens must be", [](auto& s) { s.chunk_tokens = 0; }},
      {"chunk_tokens must be", [](auto& s) { s.chunk_tokens = kChunk + 1; }},
      {"must ascend", [](auto& s) { s.macro_ends.back() += 1; }},
      {"must ascend", [](auto& s) { s.wave_ends.clear(); }},
      {"must ascend", [](auto& s) { std::swap(s.wave_ends.front(), s.wave_ends.back()); }},
      {"must ascend", [](auto& s) { s.wave_ends = {s.num_chunks}; }},  // not a seal for the first macro-chunk
      {"must ascend", [](auto& s) { s.num_chunks += 1; }},
      {"chunks hold", [](auto& s) { s.num_tokens += kChunk; }},
      {"chunks hold", [](auto& s) { s.num_tokens = 1; }},
      {"num_experts must be", [](auto& s) { s.problem.num_experts = 0; }},
      {"num_experts must be", [](auto& s) { s.problem.num_experts = int64_t{1} << 30; }},
  };
  for (const Case& c : cases) {
    CallSpec bad = good;
    c.change(bad);
    const Status status =
        static_cast<cpu::Stream&>(*world.ring->find_member(0)->stream).open(bad, world.layer.weights(0));
    EXPECT(status.code() == Code::kInvalidArgument && status.message().find(c.text) != std::string::npos, "%s: '%s'",
           c.text, status.message().c_str());
  }
  EXPECT(!world.ring->in_use(), "a refused plan opened the stream");
  const std::vector<std::function<void(CallSpec&)>> tagged = {
      [](auto& s) { s.problem.block_m *= 2; }, [](auto& s) { s.problem.limit = 7; }, [](auto& s) { s.packed = false; },
      [](auto& s) { s.min_carry_rows += 1; }, [](auto& s) { s.backward = true; }};
  for (size_t n = 0; n < tagged.size(); ++n) {
    CallSpec other = good;
    tagged[n](other);
    EXPECT(other.tag() != good.tag(), "change %zu leaves the tag alone", n);
  }
}

void moved_experts() {
  World world(1, 2);
  for (const bool overlap : {false, true}) {
    world.make(20);
    auto& stream = static_cast<cpu::Stream&>(*world.ring->find_member(0)->stream);
    const CallSpec spec = call_spec(world.layer, kChunk, 2, overlap, true);
    const Tokens t = tokens_of(0, 0, kChunk, kLocal);
    std::vector<float> y(static_cast<size_t>(kChunk * kHidden));
    const ExpertWeights weights = world.layer.weights(0);
    EXPECT(stream.open(spec, weights).ok(), "open");
    EXPECT(stream.publish_route(0, t.ids.data(), t.weights.data(), y.data()).ok(), "route");
    EXPECT(stream.publish_layout(0, t.x.data(), y.data()).ok(), "layout");
    ExpertWeights moved = weights;
    moved.b_down.data = y.data();
    CallStats stats;
    const Status status = stream.close(moved, y.data(), &stats);
    EXPECT(
        status.code() == Code::kFailedPrecondition && status.message().find("moved the experts") != std::string::npos,
        "'%s'", status.message().c_str());
    EXPECT(world.ring->failed(), "the ring is not terminal");
    stream.abort(status);
  }
}

}  // namespace
}  // namespace streammoe

int main() {
  using namespace streammoe;
  const double begin = now_s();
  for (int64_t ranks = 1; ranks <= 4; ++ranks) {
    for (int64_t slots = 1; slots <= 3; ++slots) {
      for (const bool overlap : {false, true}) {
        words(ranks, slots, overlap, 60);
        streams(ranks, slots, overlap, (ranks + slots) % 2 == 0, 12);
      }
    }
  }
  std::printf("ranks, slots, policies: %.1f s\n", now_s() - begin);
  for (int phase = 0; phase <= static_cast<int>(Phase::kClose); ++phase) {
    for (const bool overlap : {false, true}) {
      broken(3, overlap, static_cast<Phase>(phase), FaultKind::kFail);
      if (phase <= static_cast<int>(Phase::kDone)) broken(3, overlap, static_cast<Phase>(phase), FaultKind::kDrop);
    }
  }
  different_plans();
  inconsistent_plans();
  moved_experts();
  std::printf("%s, %.1f s\n", failures == 0 ? "ok" : "FAILED", now_s() - begin);
  return failures == 0 ? 0 : 1;
}
