// The library's own error value: a code and a text. Nothing below cc/ffi knows XLA's error type.
#pragma once

#include <cstdint>
#include <sstream>
#include <string>
#include <utility>

namespace streammoe {

enum class Code : int32_t { kOk = 0, kInvalidArgument, kFailedPrecondition, kDeadlineExceeded, kAborted, kNotFound };

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string message) : code_(code), message_(std::move(message)) {}
  bool ok() const { return code_ == Code::kOk; }
  Code code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  Code code_ = Code::kOk;
  std::string message_;
};

// error(Code::kNotFound, "ring '", name, "' is not open")
template <class... Parts>
Status error(Code code, const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return Status(code, out.str());
}

#define STREAMMOE_RETURN_IF_ERROR(expr) \
  if (::streammoe::Status status_ = (expr); !status_.ok()) return status_

}  // namespace streammoe
