// Handlers of cc/ffi/ring.cc, by target name without version suffix.
#pragma once

#include <utility>
#include <vector>

namespace streammoe::ffi_glue {

std::vector<std::pair<const char*, void*>> ring_handlers();

}  // namespace streammoe::ffi_glue
