// A training whose process is killed resumes from the last step that all ranks have committed, bit for bit.

#include <catch2/catch.hpp>
#include <chrono>
#include <random>
#include <thread>

#include "tests/sanitizer.h"
#include "tests/temporary_directory.h"
#include "tests/zero/child_process.h"
#include "tests/zero/progress_pipe.h"
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

// Trains in a process of its own and kills it a moment after its nth step.
void train_and_kill(Setup setup, std::size_t steps, std::chrono::microseconds moment) {
  ProgressPipe progress;
  setup.progress = progress.writing_end();
  const ChildProcess child([&] { train(setup); });
  progress.close_writing();
  progress.wait_for_steps(steps);
  std::this_thread::sleep_for(moment);
  child.kill();
  REQUIRE(child.ends_killed());
}

}  // namespace

TEST_CASE("a killed training resumes with the bits of one that was not killed") {
  for (const bool parameters_too : {false, true}) {
    Setup setup = setup_on_drives(parameters_too);
    const std::vector<Outcome> expected = train(setup);
    std::mt19937 random(7);
    for (int attempt = 0; attempt < (sanitized ? 2 : 6); ++attempt) {
      CAPTURE(parameters_too, attempt);
      const TemporaryDirectory directory;
      setup.directory = directory.path();
      std::size_t steps = 0;
      for (int kill = 0; kill < 3; ++kill) {  // the first one sometimes comes before anything has begun
        const std::size_t more = random() % 10;
        train_and_kill(setup, more, std::chrono::microseconds(random() % 1000));
        steps += more;
      }
      const std::vector<Outcome> outcomes = train(setup);
      for (std::size_t rank = 0; rank < outcomes.size(); ++rank) {
        CHECK(outcomes[rank].steps == setup.steps);
        CHECK(outcomes[rank].began_at == outcomes[0].began_at);
        CHECK(outcomes[rank].began_at + 6 >=
              steps);  // no more is lost than the steps under way: one or two for each kill
        CHECK((outcomes[rank].parameters == expected[rank].parameters));
      }
    }
  }
}
