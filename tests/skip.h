// A test that this machine cannot run says why and ends: `if (nodes < 2) return skip("only one NUMA node");`
// ctest reads the line and reports the test as skipped (tests/CMakeLists.txt), ./run-tests prints the reason.
// A test that needs a GPU only carries the tag [gpu]; main.cpp does the rest.
#pragma once

#include <iostream>
#include <string_view>

namespace ballast {

inline void skip(std::string_view reason) { std::cout << "test skipped: " << reason << std::endl; }

}  // namespace ballast
