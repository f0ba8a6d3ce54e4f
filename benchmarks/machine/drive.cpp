// show_drive DIRECTORY: prints the speed of the drive, and the load of training a model of 7 billion parameters on it.
#include <fmt/format.h>

#include "offload/preflight.h"

int main(int count, char** arguments) {
  using namespace ballast::offload;
  try {
    const auto queue = open_queue();
    // Each parameter has twelve bytes of state, in two places. One of them is written in each step, a step a minute.
    constexpr std::uint64_t state = 12ull * 7'000'000'000;
    fmt::print("{}", describe(inspect(count > 1 ? arguments[1] : ".", *queue),
                              Load{.state_bytes = 2 * state, .written_per_step = state, .seconds_per_step = 60}));
    return 0;
  } catch (const std::exception& problem) {
    fmt::print("{}\n", problem.what());
    return 2;
  }
}
