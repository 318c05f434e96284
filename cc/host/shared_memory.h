// A named piece of POSIX shared memory: the ring's heap when ranks live in several processes.
//
// Contract: create() makes a zeroed segment and fails if the name exists; attach() maps one that a peer created
// and checks its size. unlink() removes the name, which is done as soon as every peer is attached, so that
// nothing is left behind when processes die. The mapping lives as long as the object.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "host/status.h"

namespace streammoe {

class SharedMemory {
 public:
  static Status create(const std::string& name, int64_t bytes, std::shared_ptr<SharedMemory>* out);
  static Status attach(const std::string& name, int64_t bytes, std::shared_ptr<SharedMemory>* out);
  static void unlink(const std::string& name);
  ~SharedMemory();
  uint8_t* data() const { return data_; }

 private:
  static Status map(int fd, const std::string& name, int64_t bytes, std::shared_ptr<SharedMemory>* out);
  uint8_t* data_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace streammoe
