// A training whose process is killed resumes from the last step that all ranks have committed, bit for bit.

#include <catch2/catch.hpp>
#include <random>

#include "tests/sanitizer.h"
#include "tests/temporary_directory.h"
#include "tests/zero/progress_pipe.h"
#include "tests/zero/training_rig.h"

using namespace ballast;
using namespace ballast::testing;

namespace {

Setup setup_on_drives(bool parameters_too) {
  Setup setup{.placement = placement_of_stage(3, 3), .tile_elements = 128, .steps = 60};
  setup.placement.state = Tier::nvme;
  if (parameters_too) {
    setup.placement.parameters = Tier::nvme;
    setup.schedule.update_in_backward = true;
  }
  return setup;
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
        kill_after(more, std::chrono::microseconds(random() % 1000), [&](int descriptor) {
          Setup reporting = setup;
          reporting.progress = descriptor;
          train(reporting);
        });
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
