// POSIX shared memory. See shared_memory.h for the contract.
#include "host/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace streammoe {

Status SharedMemory::map(int fd, const std::string& name, int64_t bytes, std::shared_ptr<SharedMemory>* out) {
  void* data = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  const int saved = errno;
  close(fd);
  if (data == MAP_FAILED) {
    return error(Code::kFailedPrecondition, "shared memory '", name, "': mmap of ", bytes,
                 " bytes failed: ", std::strerror(saved));
  }
  *out = std::make_shared<SharedMemory>();
  (*out)->data_ = static_cast<uint8_t*>(data);
  (*out)->bytes_ = bytes;
  return {};
}

Status SharedMemory::create(const std::string& name, int64_t bytes, std::shared_ptr<SharedMemory>* out) {
  const int fd = shm_open(name.c_str(), O_RDWR | O_CREAT | O_EXCL, 0600);
  if (fd < 0) {
    return error(Code::kFailedPrecondition, "shared memory '", name, "' cannot be created: ", std::strerror(errno));
  }
  // posix_fallocate, not ftruncate alone: a full /dev/shm is an error here instead of a SIGBUS at first touch.
  const int failed = posix_fallocate(fd, 0, bytes);
  if (failed != 0) {
    close(fd);
    shm_unlink(name.c_str());
    return error(Code::kFailedPrecondition, "shared memory '", name, "' of ", bytes,
                 " bytes cannot be reserved: ", std::strerror(failed),
                 "; /dev/shm is too small, or use a smaller ring");
  }
  return map(fd, name, bytes, out);
}

Status SharedMemory::attach(const std::string& name, int64_t bytes, std::shared_ptr<SharedMemory>* out) {
  const int fd = shm_open(name.c_str(), O_RDWR, 0600);
  if (fd < 0) {
    return error(Code::kNotFound, "shared memory '", name, "' cannot be opened: ", std::strerror(errno));
  }
  struct stat info{};
  if (fstat(fd, &info) != 0 || info.st_size != bytes) {
    close(fd);
    return error(Code::kFailedPrecondition, "shared memory '", name, "' has ", info.st_size, " bytes, wanted ", bytes);
  }
  return map(fd, name, bytes, out);
}

void SharedMemory::unlink(const std::string& name) { shm_unlink(name.c_str()); }

SharedMemory::~SharedMemory() {
  if (data_ != nullptr) munmap(data_, static_cast<size_t>(bytes_));
}

}  // namespace streammoe
