// Handlers of cc/ffi/layer.cc, by target name without version suffix.
#pragma once

#include <utility>
#include <vector>

namespace streammoe::ffi_glue {

std::vector<std::pair<const char*, void*>> layer_handlers();

}  // namespace streammoe::ffi_glue
