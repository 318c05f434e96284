// The Python module _jax_streammoe: handler capsules, the ring registry, timeline and fault hooks. Nothing else.
//
// Handlers hold no Python symbol; this file holds no logic. Names here are what jax_streammoe/{ffi,ring,symmetric,
// trace,testing}.py call.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <stdexcept>

#include "cpu/stream.h"
#include "cpu/threads.h"
#ifdef STREAMMOE_WITH_CUDA
#include "cuda/peer_memory.h"
#include "ffi/cuda_backward.h"
#include "ffi/cuda_layer.h"
#include "ffi/cuda_ring.h"
#endif
#include "ffi/layer.h"
#include "ffi/ring.h"
#include "host/events.h"
#include "host/registry.h"
#include "xla/ffi/api/c_api.h"

namespace nb = nanobind;
using namespace streammoe;

namespace {

void check(const Status& status) {
  if (!status.ok()) throw std::runtime_error(status.message());
}

std::shared_ptr<Ring> require(const std::string& name) {
  auto ring = Registry::get().find(name);
  if (ring == nullptr) throw std::runtime_error("ring '" + name + "' does not exist in this process");
  return ring;
}

RingShape shape_from(const nb::dict& d) {
  const auto get = [&](const char* key) { return nb::cast<int64_t>(d[key]); };
  RingShape s;
  s.num_ranks = get("num_ranks"), s.num_slots = get("num_slots"), s.chunk_tokens = get("chunk_tokens");
  s.hidden = get("hidden"), s.top_k = get("top_k"), s.itemsize = get("itemsize"), s.pool_tokens = get("pool_tokens");
  s.num_experts = get("num_experts"), s.intermediate = get("intermediate");
  return s;
}

nb::dict layout_dict(const nb::dict& shape) {
  const RingLayout l = make_ring_layout(shape_from(shape));
  nb::dict d;
  d["header"] = l.header, d["call"] = l.call, d["peers"] = l.peers;
  d["route_ready"] = l.route_ready, d["layout_ready"] = l.layout_ready;
  d["consumed"] = l.consumed, d["done"] = l.done, d["abort"] = l.abort, d["error"] = l.error;
  d["slots"] = l.slots, d["slot_stride"] = l.slot_stride, d["slot_x"] = l.slot_x, d["slot_x_scale"] = l.slot_x_scale;
  d["slot_topk_ids"] = l.slot_topk_ids, d["slot_topk_weights"] = l.slot_topk_weights;
  d["slot_route_descriptor"] = l.slot_route_descriptor, d["slot_layout_descriptor"] = l.slot_layout_descriptor;
  d["token_pool"] = l.token_pool, d["combine_rows"] = l.combine_rows, d["combine_ids"] = l.combine_ids;
  d["combine_weights"] = l.combine_weights, d["combine_flags"] = l.combine_flags, d["stats"] = l.stats;
  d["routes"] = l.routes, d["computed"] = l.computed, d["plan"] = l.plan, d["activations"] = l.activations,
  d["total"] = l.total;
  return d;
}

nb::dict handlers() {
  nb::dict d;
  for (const auto& table : {ffi_glue::layer_handlers(), ffi_glue::ring_handlers()}) {
    for (const auto& [name, address] : table) d[name] = nb::capsule(address, "xla._CUSTOM_CALL_TARGET");
  }
  return d;
}

// CUDA handlers as name -> {stage -> capsule}; empty in a build without CUDA.
nb::dict cuda_handlers() {
  nb::dict d;
#ifdef STREAMMOE_WITH_CUDA
  for (const auto& table :
       {ffi_glue::cuda_layer_handlers(), ffi_glue::cuda_backward_handlers(), ffi_glue::cuda_ring_handlers()}) {
    for (const auto& handler : table) {
      if (!d.contains(handler.name)) d[handler.name] = nb::dict();
      nb::cast<nb::dict>(d[handler.name])[handler.stage] = nb::capsule(handler.address, "xla._CUSTOM_CALL_TARGET");
    }
  }
#endif
  return d;
}

int64_t cuda_forward_bytes(int64_t num_tokens, int64_t top_k, int64_t hidden, int64_t intermediate,
                           int64_t num_experts) {
#ifdef STREAMMOE_WITH_CUDA
  return ffi_glue::cuda_forward_bytes(num_tokens, top_k, hidden, intermediate, num_experts);
#else
  (void)num_tokens, (void)top_k, (void)hidden, (void)intermediate, (void)num_experts;
  throw std::runtime_error("jax_streammoe was built without CUDA");
#endif
}

int64_t cuda_backward_bytes(int64_t num_tokens, int64_t top_k, int64_t hidden, int64_t intermediate,
                            int64_t num_experts, bool gated) {
#ifdef STREAMMOE_WITH_CUDA
  return ffi_glue::cuda_backward_bytes(num_tokens, top_k, hidden, intermediate, num_experts, gated);
#else
  (void)num_tokens, (void)top_k, (void)hidden, (void)intermediate, (void)num_experts, (void)gated;
  throw std::runtime_error("jax_streammoe was built without CUDA");
#endif
}

std::shared_ptr<RankStream> make_cpu_stream(Ring* ring, int64_t group, int64_t rank) {
  return std::make_shared<cpu::Stream>(ring, group, rank);
}

std::shared_ptr<RankStream> make_cuda_stream(Ring* ring, int64_t group, int64_t rank) {
#ifdef STREAMMOE_WITH_CUDA
  return ffi_glue::make_cuda_stream(ring, group, rank);
#else
  (void)ring, (void)group, (void)rank;
  throw std::runtime_error("jax_streammoe was built without CUDA");
#endif
}

// members: (device ordinal, group, rank) of the ranks that run in this process.
void ring_create(const std::string& name, const nb::dict& shape, int64_t num_groups, double timeout_s,
                 const std::vector<std::vector<int64_t>>& members) {
  const RingShape sizes = shape_from(shape);
  std::shared_ptr<Ring> ring;
  {
    nb::gil_scoped_release unlocked;  // a ring that is replaced may have to join its worker
    ring =
        Registry::get().create(name, sizes, num_groups, timeout_s, sizes.on_gpu() ? make_cuda_stream : make_cpu_stream);
  }
  for (const auto& m : members) ring->add_member(m.at(0), m.at(1), m.at(2));
}

void ring_share(const std::string& name, int64_t group, int64_t rank, const std::string& segment, bool create) {
  const auto ring = require(name);
  std::shared_ptr<SharedMemory> memory;
  check(create ? SharedMemory::create(segment, ring->layout().total, &memory)
               : SharedMemory::attach(segment, ring->layout().total, &memory));
  ring->keep(group, rank, std::move(memory));
}

#ifdef STREAMMOE_WITH_CUDA

nb::tuple ring_export(const std::string& name, int64_t group, int64_t rank) {
  cuda::ExportedMemory memory;
  check(cuda::export_rank(*require(name), group, rank, &memory));
  return nb::make_tuple(memory.fd, memory.bytes, memory.offset);
}

void ring_import(const std::string& name, int64_t group, int64_t rank, int fd, int64_t bytes, int64_t offset) {
  const nb::gil_scoped_release unlocked;
  check(cuda::import_rank(*require(name), group, rank, fd, bytes, offset));
}

void ring_check_peers(const std::string& name) { check(cuda::check_peers(*require(name))); }

void ring_settle(const std::string& name) {
  const nb::gil_scoped_release unlocked;
  check(cuda::settle(*require(name)));
}

#endif

// Control words of one rank as (name -> list); for inspect().
nb::dict ring_words(const std::string& name, int64_t group, int64_t rank) {
  const auto ring = require(name);
  const RankStream* stream = ring->find_stream(group, rank);
  if (stream == nullptr || ring->base(group, rank) == nullptr) {
    throw std::runtime_error("ring '" + name + "' has no memory for that rank in this process");
  }
  std::vector<uint8_t> control;
  check(stream->read_control(&control));
  const RingShape& s = ring->shape();
  const RingLayout& l = ring->layout();
  const auto word = [&](int64_t offset) {
    uint64_t value = 0;
    std::memcpy(&value, control.data() + offset, sizeof(value));
    return value;
  };
  const auto table = [&](int64_t offset, int64_t slots) {
    std::vector<std::vector<uint64_t>> words;
    for (int64_t r = 0; r < s.num_ranks; ++r) {
      auto& row = words.emplace_back();
      for (int64_t i = 0; i < slots; ++i) row.push_back(word(l.word(offset, r, i, slots)));
    }
    return words;
  };
  RingHeader header;
  std::memcpy(&header, control.data() + l.header, sizeof(header));
  nb::dict d;
  d["sequence_base"] = header.sequence_base, d["call_number"] = header.call_number;
  d["macro_number"] = header.macro_number;
  d["route_ready"] = table(l.route_ready, s.num_slots), d["layout_ready"] = table(l.layout_ready, s.num_slots);
  d["consumed"] = table(l.consumed, s.num_slots), d["done"] = table(l.done, 1), d["abort"] = table(l.abort, 1);
  d["error"] = std::string(reinterpret_cast<const char*>(control.data() + l.error));
  return d;
}

std::vector<nb::dict> timeline_stop() {
  std::vector<nb::dict> out;
  for (const Event& e : Timeline::get().stop()) {
    nb::dict d;
    d["ring"] = e.ring, d["group"] = e.group, d["rank"] = e.rank, d["phase"] = phase_name(e.phase);
    d["chunk"] = e.chunk, d["last_chunk"] = e.last_chunk, d["begin_s"] = e.begin_s, d["end_s"] = e.end_s;
    out.push_back(std::move(d));
  }
  return out;
}

void fault_add(const std::string& ring, int64_t rank, const std::string& phase, const std::string& kind,
               double seconds) {
  const int32_t p = phase_of(phase);
  if (p < 0) throw std::invalid_argument("unknown phase '" + phase + "'");
  const std::vector<std::string> kinds = {"delay", "jitter", "fail", "drop"};
  for (size_t k = 0; k < kinds.size(); ++k) {
    if (kinds[k] == kind) {
      return Faults::get().add({ring, rank, static_cast<Phase>(p), static_cast<FaultKind>(k), seconds});
    }
  }
  throw std::invalid_argument("unknown fault '" + kind + "', want delay, jitter, fail or drop");
}

}  // namespace

NB_MODULE(_jax_streammoe, m) {
  m.attr("__doc__") = "Compiled half of jax_streammoe: FFI handlers, ring registry, timeline, faults.";
  m.attr("FFI_API_VERSION") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
#ifdef STREAMMOE_WITH_CUDA
  m.attr("WITH_CUDA") = true;
#else
  m.attr("WITH_CUDA") = false;
#endif
  m.def("cpu_handlers", &handlers);
  m.def("cuda_handlers", &cuda_handlers);
  m.def("cuda_forward_bytes", &cuda_forward_bytes, nb::arg("num_tokens"), nb::arg("top_k"), nb::arg("hidden"),
        nb::arg("intermediate"), nb::arg("num_experts"));
  m.def("cuda_backward_bytes", &cuda_backward_bytes, nb::arg("num_tokens"), nb::arg("top_k"), nb::arg("hidden"),
        nb::arg("intermediate"), nb::arg("num_experts"), nb::arg("gated"));
  m.def("default_threads", &cpu::default_threads);
  m.def("ring_layout", &layout_dict, nb::arg("shape"));
  m.def("ring_create", &ring_create, nb::arg("name"), nb::arg("shape"), nb::arg("num_groups"), nb::arg("timeout_s"),
        nb::arg("members"));
  m.def("ring_share", &ring_share, nb::arg("name"), nb::arg("group"), nb::arg("rank"), nb::arg("segment"),
        nb::arg("create"));
  m.def("segment_unlink", &SharedMemory::unlink, nb::arg("segment"));
#ifdef STREAMMOE_WITH_CUDA
  m.def("ring_export", &ring_export, nb::arg("name"), nb::arg("group"), nb::arg("rank"));
  m.def("ring_import", &ring_import, nb::arg("name"), nb::arg("group"), nb::arg("rank"), nb::arg("fd"),
        nb::arg("bytes"), nb::arg("offset"));
  m.def("ring_check_peers", &ring_check_peers, nb::arg("name"));
  m.def("ring_settle", &ring_settle, nb::arg("name"));
#endif
  // For memory that must not be reused, whatever becomes of those who know it.
  m.def("keep_forever", [](const nb::object& object) { object.inc_ref(); }, nb::arg("object"));
  m.def(
      "ring_close", [](const std::string& name) { return Registry::get().close(name); }, nb::arg("name"),
      nb::call_guard<nb::gil_scoped_release>());
  m.def("ring_exists", [](const std::string& name) { return Registry::get().find(name) != nullptr; }, nb::arg("name"));
  m.def("ring_members", [](const std::string& name) { return require(name)->local_ranks(); }, nb::arg("name"));
  m.def(
      "ring_failure",
      [](const std::string& name) {
        const auto ring = require(name);
        ring->poll();
        return ring->failure();
      },
      nb::arg("name"));
  m.def("ring_words", &ring_words, nb::arg("name"), nb::arg("group"), nb::arg("rank"));
  m.def("timeline_start", [] { Timeline::get().start(); });
  m.def("timeline_stop", &timeline_stop);
  m.def("now_s", &now_s);
  m.def("fault_add", &fault_add, nb::arg("ring"), nb::arg("rank"), nb::arg("phase"), nb::arg("kind"),
        nb::arg("seconds"));
  m.def("fault_clear", [] { Faults::get().clear(); });
}
