// The table of all error codes. ERRORS.md is generated from it.
#pragma once

#include <ballast/error.h>

#include <span>
#include <string_view>

namespace ballast {

struct CodeInfo {
  Code code;
  std::string_view name;
  std::string_view meaning;
  std::string_view remedy;
};

std::span<const CodeInfo> all_codes();  // sorted by number
const CodeInfo& describe(Code code);

}  // namespace ballast
