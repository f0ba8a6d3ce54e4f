#include "tests/emulated_cuda/rules.h"

#include <cstdio>
#include <cstdlib>

namespace emulated {

void broken(std::string_view rule, const std::string& what) {
  std::fprintf(stderr, "emulated CUDA: broken rule \"%s\": %s\n", std::string(rule).c_str(), what.c_str());
  std::fflush(stderr);
  std::abort();
}

}  // namespace emulated
