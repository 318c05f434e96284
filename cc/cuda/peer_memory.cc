// Memory of peers in other processes. See peer_memory.h for the contract.
#include "cuda/peer_memory.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <fcntl.h>

#include <string>

#include "cuda/status.h"

namespace streammoe::cuda {
namespace {

constexpr const char* kWhatElse =
    ". Otherwise leave ring=None, which exchanges through XLA's collectives, or give one process all GPUs of the ring";
constexpr const char* kPeerAccess =
    ". A ring needs peer access between all of its GPUs, `nvidia-smi topo -p2p rw` shows who has it. Otherwise leave "
    "ring=None, which exchanges through XLA's collectives";

// The driver's functions; nullptr where there is no driver.
struct Driver {
  decltype(&cuGetErrorName) error_name = find<decltype(&cuGetErrorName)>("cuGetErrorName");
  decltype(&cuCtxGetCurrent) current_context = find<decltype(&cuCtxGetCurrent)>("cuCtxGetCurrent");
  decltype(&cuCtxSetCurrent) set_context = find<decltype(&cuCtxSetCurrent)>("cuCtxSetCurrent");
  decltype(&cuMemGetAddressRange) address_range = find<decltype(&cuMemGetAddressRange)>("cuMemGetAddressRange");
  decltype(&cuMemRetainAllocationHandle) retain =
      find<decltype(&cuMemRetainAllocationHandle)>("cuMemRetainAllocationHandle");
  decltype(&cuMemRelease) release = find<decltype(&cuMemRelease)>("cuMemRelease");
  decltype(&cuMemExportToShareableHandle) export_handle =
      find<decltype(&cuMemExportToShareableHandle)>("cuMemExportToShareableHandle");
  decltype(&cuMemImportFromShareableHandle) import_handle =
      find<decltype(&cuMemImportFromShareableHandle)>("cuMemImportFromShareableHandle");
  decltype(&cuMemAddressReserve) reserve = find<decltype(&cuMemAddressReserve)>("cuMemAddressReserve");
  decltype(&cuMemAddressFree) free_address = find<decltype(&cuMemAddressFree)>("cuMemAddressFree");
  decltype(&cuMemMap) map = find<decltype(&cuMemMap)>("cuMemMap");
  decltype(&cuMemUnmap) unmap = find<decltype(&cuMemUnmap)>("cuMemUnmap");
  decltype(&cuMemSetAccess) set_access = find<decltype(&cuMemSetAccess)>("cuMemSetAccess");

  bool complete() const {
    return error_name != nullptr && current_context != nullptr && set_context != nullptr && address_range != nullptr &&
           retain != nullptr && release != nullptr && export_handle != nullptr && import_handle != nullptr &&
           reserve != nullptr && free_address != nullptr && map != nullptr && unmap != nullptr && set_access != nullptr;
  }

  static const Driver& get() {
    static const Driver driver;
    return driver;
  }

 private:
  template <class Function>
  static Function find(const char* name) {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    // 12000: every function here had its present signature by then.
    const cudaError_t status = cudaGetDriverEntryPointByVersion(name, &entry, 12000, cudaEnableDefault, &found);
    if (status != cudaSuccess || found != cudaDriverEntryPointSuccess) return nullptr;
    return reinterpret_cast<Function>(entry);
  }
};

Status require_driver() {
  if (Driver::get().complete()) return {};
  return error(Code::kFailedPrecondition,
               "the CUDA driver is missing, or too old to share memory between processes (12.0 is needed)");
}

// "cuMemMap: CUDA_ERROR_INVALID_VALUE"
std::string failure(const char* call, CUresult result) {
  const char* name = nullptr;
  if (Driver::get().error_name(result, &name) != CUDA_SUCCESS) name = "unknown error";
  return std::string(call) + ": " + name;
}

// Makes a device current on this thread as long as it lives. Restores the context and not the device: choosing a device
// makes a context on it, and the one before may be a GPU that this process never touches.
class DeviceScope {
 public:
  explicit DeviceScope(int64_t device) {
    status_ = require_driver();
    if (!status_.ok()) return;
    restore_ = Driver::get().current_context(&before_) == CUDA_SUCCESS;
    status_ = cuda_status(cudaSetDevice(static_cast<int>(device)), "choosing the ring's GPU");
  }
  ~DeviceScope() {
    if (restore_) (void)Driver::get().set_context(before_);
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;
  const Status& status() const { return status_; }

 private:
  CUcontext before_ = nullptr;
  bool restore_ = false;
  Status status_;
};

// A reference to an allocation, apart from its mappings.
struct Handle {
  CUmemGenericAllocationHandle value = 0;
  bool held = false;
  Handle() = default;
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
  ~Handle() {
    if (held) (void)Driver::get().release(value);
  }
};

Status synchronize(int64_t device) {
  const DeviceScope scope(device);
  STREAMMOE_RETURN_IF_ERROR(scope.status());
  return cuda_status(cudaDeviceSynchronize(), "waiting for a GPU");
}

std::vector<int> devices_of(const Ring& ring, int64_t group) {
  std::vector<int> devices;
  for (const auto& [g, rank] : ring.local_ranks()) {
    if (g == group) devices.push_back(static_cast<int>(ring.find_rank(g, rank)->ordinal));
  }
  return devices;
}

Status not_shareable(const Ring& ring, int64_t rank, const std::string& why) {
  return error(Code::kFailedPrecondition, "ring '", ring.name(), "': the memory of rank ", rank,
               " cannot be shared with other processes (", why,
               "). It must come from XLA's default allocator: do not set XLA_PYTHON_CLIENT_ALLOCATOR=cuda_async",
               kWhatElse);
}

}  // namespace

Status PeerMemory::map(int fd, int64_t bytes, const std::vector<int>& devices, std::shared_ptr<PeerMemory>* out) {
  if (bytes <= 0 || devices.empty()) return error(Code::kInvalidArgument, "a peer's memory needs bytes and a GPU");
  const Driver& driver = Driver::get();
  const DeviceScope scope(devices.front());
  STREAMMOE_RETURN_IF_ERROR(scope.status());
  const auto failed = [](const char* call, CUresult result, const char* what_then) {
    return error(Code::kFailedPrecondition, "a peer's memory cannot be mapped (", failure(call, result), ")",
                 what_then);
  };
  auto memory = std::make_shared<PeerMemory>();  // undoes the steps before one that fails
  memory->bytes_ = static_cast<size_t>(bytes), memory->devices_ = devices;
  Handle handle;
  CUresult result =
      driver.import_handle(&handle.value, reinterpret_cast<void*>(static_cast<uintptr_t>(fd)),  // NOLINT: CUDA's way
                           CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  if (result != CUDA_SUCCESS) return failed("cuMemImportFromShareableHandle", result, kWhatElse);
  handle.held = true;
  CUdeviceptr address = 0;
  result = driver.reserve(&address, memory->bytes_, 0, 0, 0);
  if (result != CUDA_SUCCESS) return failed("cuMemAddressReserve", result, kWhatElse);
  memory->address_ = address;
  result = driver.map(address, memory->bytes_, 0, handle.value, 0);
  if (result != CUDA_SUCCESS) {
    return failed("cuMemMap", result,
                  ". Its ring may lie in memory that was allocated piece by piece: let XLA allocate its pool at once "
                  "(XLA_PYTHON_CLIENT_PREALLOCATE=true, the default)");
  }
  memory->mapped_ = true;
  std::vector<CUmemAccessDesc> access;
  for (const int device : devices) {
    CUmemAccessDesc& one = access.emplace_back();
    one.location.type = CU_MEM_LOCATION_TYPE_DEVICE, one.location.id = device;
    one.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  }
  result = driver.set_access(address, memory->bytes_, access.data(), access.size());
  if (result != CUDA_SUCCESS) {
    return failed("cuMemSetAccess", result, kPeerAccess);
  }
  *out = std::move(memory);
  return {};
}

PeerMemory::~PeerMemory() {
  const Driver& driver = Driver::get();
  if (mapped_) {
    // Unmapping waits for nothing: a kernel that still reads or writes here would end the process's use of the GPU.
    for (const int device : devices_) {
      if (!synchronize(device).ok()) return;
    }
    if (driver.unmap(address_, bytes_) != CUDA_SUCCESS) return;
  }
  if (address_ != 0) (void)driver.free_address(address_, bytes_);
}

Status export_rank(const Ring& ring, int64_t group, int64_t rank, ExportedMemory* out) {
  const Driver& driver = Driver::get();
  const Member* member = ring.find_rank(group, rank);
  if (member == nullptr || ring.base(group, rank) == nullptr) {
    return error(Code::kFailedPrecondition, "ring '", ring.name(), "': rank ", rank, " is not registered here");
  }
  const DeviceScope scope(member->ordinal);
  STREAMMOE_RETURN_IF_ERROR(scope.status());
  uint8_t* base = ring.base(group, rank);
  const auto address = reinterpret_cast<CUdeviceptr>(base);
  Handle handle;
  CUresult result = driver.retain(&handle.value, base);
  if (result != CUDA_SUCCESS) return not_shareable(ring, rank, failure("cuMemRetainAllocationHandle", result));
  handle.held = true;
  CUdeviceptr start = 0;
  size_t bytes = 0;
  result = driver.address_range(&start, &bytes, address);
  if (result != CUDA_SUCCESS) return not_shareable(ring, rank, failure("cuMemGetAddressRange", result));
  const int64_t needed = ring.layout().total;
  if (address < start || address + static_cast<size_t>(needed) > start + bytes) {
    return error(Code::kFailedPrecondition, "ring '", ring.name(), "': the memory of rank ", rank,
                 " lies in several allocations, and a ring that other processes map must lie in one: let XLA allocate ",
                 "its pool at once (XLA_PYTHON_CLIENT_PREALLOCATE=true, the default)");
  }
  int fd = -1;
  result = driver.export_handle(&fd, handle.value, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
  if (result != CUDA_SUCCESS) return not_shareable(ring, rank, failure("cuMemExportToShareableHandle", result));
  (void)fcntl(fd, F_SETFD, FD_CLOEXEC);  // not for programs that this process starts
  out->fd = fd, out->bytes = static_cast<int64_t>(bytes), out->offset = static_cast<int64_t>(address - start);
  return {};
}

Status import_rank(Ring& ring, int64_t group, int64_t rank, int fd, int64_t bytes, int64_t offset) {
  if (group < 0 || group >= ring.num_groups() || rank < 0 || rank >= ring.shape().num_ranks ||
      ring.base(group, rank) != nullptr) {
    return error(Code::kInvalidArgument, "ring '", ring.name(), "' has no rank ", rank, " of group ", group,
                 " in another process");
  }
  const int64_t needed = ring.layout().total;
  if (offset < 0 || bytes < needed || offset > bytes - needed) {
    return error(Code::kInvalidArgument, "ring '", ring.name(), "': rank ", rank, " offers ", bytes,
                 " bytes and its ring at ", offset, ", which needs ", needed);
  }
  std::shared_ptr<PeerMemory> memory;
  if (const Status status = PeerMemory::map(fd, bytes, devices_of(ring, group), &memory); !status.ok()) {
    return error(status.code(), "ring '", ring.name(), "', rank ", rank, ": ", status.message());
  }
  uint8_t* base = memory->data() + offset;
  ring.attach(group, rank, base, std::move(memory));
  return {};
}

Status check_peers(const Ring& ring) {
  for (int64_t group = 0; group < ring.num_groups(); ++group) {
    const std::vector<int> devices = devices_of(ring, group);
    for (const int from : devices) {
      for (const int to : devices) {
        int reaches = from == to ? 1 : 0;
        if (from != to) {
          STREAMMOE_CUDA(cudaDeviceCanAccessPeer(&reaches, from, to), "asking for peer access");
        }
        if (reaches == 0) {
          return error(Code::kFailedPrecondition, "ring '", ring.name(), "': GPU ", from,
                       " does not reach the memory of GPU ", to, kPeerAccess);
        }
      }
    }
  }
  return {};
}

Status settle(const Ring& ring) {
  for (const auto& [group, rank] : ring.local_ranks()) {
    STREAMMOE_RETURN_IF_ERROR(synchronize(ring.find_rank(group, rank)->ordinal));
  }
  return {};
}

}  // namespace streammoe::cuda
