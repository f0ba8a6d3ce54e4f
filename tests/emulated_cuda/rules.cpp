#include "tests/emulated_cuda/rules.h"

#include <csignal>
#include <cstdio>
#include <cstdlib>

namespace emulated {

void broken(std::string_view rule, const std::string& what) {
  std::fprintf(stderr, "emulated CUDA: broken rule \"%s\": %s\n", std::string(rule).c_str(), what.c_str());
  std::fflush(stderr);
  std::signal(SIGABRT, SIG_DFL);  // without the test framework's own words
  std::abort();
}

}  // namespace emulated
