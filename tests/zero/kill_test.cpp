// A training whose process is killed goes on from the last step that all ranks have committed, bit for bit.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <chrono>
#include <random>
#include <thread>

#include "tests/temporary_directory.h"
#include "tests/zero/training_rig.h"

using namespace ballast;
using namespace ballast::testing;

namespace {

Setup setup_on_drives(bool parameters_too) {
  Setup setup{.placement = placement_of_stage(3, 3), .tile_elements = 128, .steps = 60};
  setup.placement.state = all_in(Tier::nvme);
  if (parameters_too) {
    setup.placement.parameters = all_in(Tier::nvme);
    setup.schedule.update_in_backward = true;
  }
  return setup;
}

// Trains in a process of its own until it is done or killed; whether it was done.
bool train_and_be_killed(const Setup& setup, std::chrono::microseconds after) {
  const pid_t child = ::fork();
  if (child == 0) {
    try {
      train(setup);
      ::_exit(0);
    } catch (...) {
      ::_exit(1);
    }
  }
  std::this_thread::sleep_for(after);
  ::kill(child, SIGKILL);
  int status = 0;
  ::waitpid(child, &status, 0);
  REQUIRE((WIFSIGNALED(status) || WEXITSTATUS(status) == 0));
  return WIFEXITED(status);
}

}  // namespace

TEST_CASE("a killed training goes on with the bits of one that was not killed") {
  for (const bool parameters_too : {false, true}) {
    Setup setup = setup_on_drives(parameters_too);
    const std::vector<Outcome> expected = train(setup);
    std::mt19937 random(7);
    std::size_t kills = 0;
    std::uint64_t furthest = 0;
    for (int attempt = 0; attempt < 6; ++attempt) {
      CAPTURE(parameters_too, attempt);
      const TemporaryDirectory directory;
      setup.directory = directory.path();
      for (int kill = 0; kill < 3; ++kill) {
        if (train_and_be_killed(setup, std::chrono::microseconds(5'000 + random() % 60'000))) break;
        ++kills;
      }
      const std::vector<Outcome> outcomes = train(setup);
      for (std::size_t rank = 0; rank < outcomes.size(); ++rank) {
        CAPTURE(rank, outcomes[rank].began_at);
        CHECK(outcomes[rank].steps == setup.steps);
        CHECK(outcomes[rank].began_at == outcomes[0].began_at);
        CHECK((outcomes[rank].parameters == expected[rank].parameters));
      }
      furthest = std::max(furthest, outcomes[0].began_at);
    }
    CHECK(kills > 6);
    CHECK(furthest > 0);  // some began where the killed ones had come to
  }
}
