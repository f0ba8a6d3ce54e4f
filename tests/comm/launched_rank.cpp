// One rank of a job that a launcher starts. It prints its rank and the sum over all ranks. An argument N ends rank N by
// a signal while the others wait for it.
#include <ballast/comm.h>

#include <fmt/format.h>

#include <csignal>
#include <cstdlib>
#include <iostream>

#include "zero/comm/connect.h"

using namespace ballast;

int main(int count, char** arguments) {
  try {
    const auto ranks = connect({.timeout = std::chrono::seconds(30), .threads = 1});
    if (count > 1 && std::strtoul(arguments[1], nullptr, 10) == ranks->rank()) std::raise(SIGKILL);
    std::int64_t sum[] = {static_cast<std::int64_t>(ranks->rank())};
    ranks->all_reduce(sum);
    std::cout << fmt::format("{}: rank {} of {}, sum {}\n", launch_from(Environment()).launcher, ranks->rank(),
                             ranks->size(), sum[0])
              << std::flush;
    return 0;
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    return 1;
  }
}
