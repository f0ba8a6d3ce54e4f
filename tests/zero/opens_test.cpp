// Tests of how many files ranks open, on a drive or in a directory that all of them see.
#include "tests/count_opens.h"
#include "tests/zero/moved_run.h"

using namespace ballast;
using namespace ballast::testing;

namespace {

constexpr std::size_t few = 4, many = 16;  // ranks

// Returns the opens of ranks that resume a run of so many ranks: of as many, or of three quarters of them.
std::size_t opens_to_resume(std::size_t ranks, bool is_on_fewer) {
  const TemporaryDirectory directory;
  KeptRun run = run_of(ranks);
  begun(run, directory, 1);
  if (is_on_fewer) run.ranks = ranks * 3 / 4;
  Opens opens(directory.path());
  CHECK(train(run, 0).failures == no_failures(run.ranks));
  return opens.count();
}

std::size_t opens_to_load(std::size_t ranks) {
  const TemporaryDirectory directory;
  const TrainingOptions options{.stage = 3, .tile_elements = 256};
  const auto failures_of = [&](std::size_t size, const std::function<void(Training&)>& use) {
    return failures_of_ranks(size, [&](Communicator& world) {
      Training training(several_units(), world, {optim::AdamW{}}, options);
      training.start(initial_parameters());
      use(training);
    });
  };
  CHECK(failures_of(ranks, [&](Training& training) { training.save(directory.path()); }) == no_failures(ranks));
  Opens opens(directory.path());
  const std::size_t fewer = ranks * 3 / 4;
  const auto load = [&](Training& training) {
    if (!training.load(directory.path())) throw std::runtime_error("no checkpoint");
  };
  CHECK(failures_of(fewer, load) == no_failures(fewer));
  return opens.count();
}

void check_linear(std::size_t of_few, std::size_t of_many) {
  CAPTURE(of_few, of_many);
  CHECK(of_few >= few);
  CHECK(of_many <= of_few * many / few * 5 / 4);
}

}  // namespace

TEST_CASE("the files that ranks open to resume a run grow as their number does") {
  for (const bool is_on_fewer : {false, true}) {
    CAPTURE(is_on_fewer);
    check_linear(opens_to_resume(few, is_on_fewer), opens_to_resume(many, is_on_fewer));
  }
}

TEST_CASE("the files that ranks open to load a checkpoint grow as their number does") {
  check_linear(opens_to_load(few), opens_to_load(many));
}
