// Part of the program of benchmarks/training on emulated GPUs: each launched rank may use its own GPU only, and leaves nothing behind.
#include <cstdio>
#include <cstdlib>

#include "tests/emulated_cuda/emulated.h"
#include "zero/comm/connect.h"

using namespace ballast;

namespace {

void check_that_nothing_is_left() {
  if (emulated::live() == emulated::Live{}) return;
  std::fputs("something of the GPU was left behind\n", stderr);
  std::_Exit(EXIT_FAILURE);
}

const bool prepared = [] {  // this runs before main()
  const Launch launch = launch_from(Environment());
  if (launch.size > 1) emulated::allow_context_only_on(static_cast<int>(launch.local_rank));
  return std::atexit(check_that_nothing_is_left) == 0;
}();

}  // namespace
