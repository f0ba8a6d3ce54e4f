// Ends the process where CUDA would hang, corrupt memory, or waste memory without a word.
#pragma once

#include <string>
#include <string_view>

namespace emulated {

[[noreturn]] void broken(std::string_view rule, const std::string& what);

}  // namespace emulated
