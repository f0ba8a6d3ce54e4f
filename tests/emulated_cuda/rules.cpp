#include "tests/emulated_cuda/rules.h"

#include <csignal>
#include <cstdio>
#include <cstdlib>

namespace emulated {

void broken(std::string_view rule, const std::string& what) {
  std::fprintf(stderr, "emulated CUDA: broken rule \"%s\": %s\n", std::string(rule).c_str(), what.c_str());
  std::fflush(stderr);
  std::signal(SIGABRT, SIG_DFL);  // the test framework adds no words of its own
  std::abort();
}

}  // namespace emulated
