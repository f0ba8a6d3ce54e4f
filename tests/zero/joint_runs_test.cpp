// Tests of runs that are resumed together: which commits are chosen, and that a killed job continues with the bits of one that was
// not killed.
#include <ballast/error.h>
#include <ballast/joint_runs.h>

#include <catch2/catch.hpp>
#include <random>

#include "tests/sanitizer.h"
#include "tests/zero/kept_run.h"
#include "tests/zero/progress_pipe.h"

using namespace ballast;
using namespace ballast::testing;
using Catch::Contains;

namespace {

const std::vector<std::string> names{"matrices", "rest"};

// A commit of the round, or of none.
RunCommit commit(std::uint64_t number, std::uint64_t step, std::uint64_t round = 0) {
  return {.point = {1, number},
          .step = step,
          .round = round == 0 ? JointRound{} : JointRound{.start = 7, .number = round, .members = 2}};
}

// The numbers of the chosen commits; empty: the runs begin.
std::vector<std::uint64_t> chosen(const std::vector<std::vector<RunCommit>>& runs) {
  std::vector<std::uint64_t> numbers;
  for (const RunPoint& point : newest_joint_points(runs, names).value_or(std::vector<RunPoint>{}))
    numbers.push_back(point.number);
  return numbers;
}

using Numbers = std::vector<std::uint64_t>;

// Two trainings with rounds of their steps, as one optimizer for matrices and one for all else.
struct Pair {
  std::filesystem::path directory{};
  std::size_t ranks = 2;
  bool in_backward = false;
  std::size_t skipped = SIZE_MAX;  // the round in which the second one discards its gradients
  int progress = -1;               // descriptor on which rank 0 writes a byte for each step of each; -1: nowhere
  std::size_t rounds = 5;

  TrainingOptions options(std::size_t member) const {
    TrainingOptions options{.stage = 3, .state = all_in(Tier::nvme), .tile_elements = 128};
    options.drives = {.directories = {directory}, .run = names[member]};
    options.schedule.update_in_backward = in_backward;
    return options;
  }
};

struct Member {
  Member(const Pair& pair, std::size_t number, Communicator& world, const TrainingOptions& options)
      : training(two_layers(), world, {optim::AdamW{.lr = number == 0 ? 0.02 : 0.01}}, options),
        trainer(training.model(), world.rank()),
        progress(world.rank() == 0 ? pair.progress : -1),
        skipped(number == 1 ? pair.skipped : SIZE_MAX) {}

  void step(std::size_t round, const JointRound& joint) {
    trainer.run(training, round);
    TrainingState(training).set_round(joint);
    round == skipped ? training.step({.groups = training.groups(), .discard = true}) : training.step();
    TrainingState(training).set_round({});
    if (progress >= 0) CHECK(::write(progress, "", 1) == 1);
  }

  Training training;
  SyntheticTrainer trainer;
  int progress;
  std::size_t skipped;
};

struct Ends {  // one entry of each vector for each rank
  std::vector<std::string> failures{};
  std::vector<std::vector<std::byte>> parameters{};
  std::vector<std::vector<std::uint64_t>> began_at{};  // steps of each member
};

void train_rank(const Pair& pair, Communicator& world, Ends& ends) {
  std::vector<TrainingOptions> options{pair.options(0), pair.options(1)};
  std::vector<std::vector<RunCommit>> commits;
  for (const TrainingOptions& each : options)
    commits.push_back(commits_of_run(world, each.drives));
  const auto points = newest_joint_points(commits, names);
  std::array<std::unique_ptr<Member>, 2> members;
  for (std::size_t i = 0; i < 2; ++i) {
    options[i].drives.resume_at = points ? (*points)[i] : RunPoint{};
    options[i].drives.before_write = [&members, i](RunWrite) {
      if (members[1 - i]) TrainingState(members[1 - i]->training).wait_for_commit();
    };
    members[i] = std::make_unique<Member>(pair, i, world, options[i]);
  }
  for (const auto& member : members)
    member->training.start(initial_parameters());
  const std::size_t rank = world.rank();
  ends.began_at[rank] = {members[0]->training.steps(), members[1]->training.steps()};
  std::int64_t start = rank == 0 ? static_cast<std::int64_t>(std::random_device()()) : 0;
  world.all_reduce({&start, 1});
  for (std::size_t round = members[0]->training.steps(); round < pair.rounds; ++round) {
    for (const auto& member : members)
      member->step(round, {.start = static_cast<std::uint64_t>(start), .number = round + 1, .members = 2});
  }
  for (const auto& member : members) {
    member->training.finish();
    add_bytes(member->training.model().units[0], member->training.forward(0), nullptr, ends.parameters[rank]);
  }
}

Ends train(const Pair& pair) {
  Ends ends{.parameters = std::vector<std::vector<std::byte>>(pair.ranks),
            .began_at = std::vector<std::vector<std::uint64_t>>(pair.ranks)};
  ends.failures = failures_of_ranks(pair.ranks, [&](Communicator& world) { train_rank(pair, world, ends); });
  return ends;
}

void train_and_kill(Pair pair, std::size_t steps, std::chrono::microseconds moment) {
  pair.rounds = 1000;
  kill_after(steps, moment, [&](int descriptor) {
    pair.progress = descriptor;
    train(pair);
  });
}

void check_ends(const Ends& ends, const Ends& expected) {
  for (const std::string& failure : ends.failures)
    CHECK(failure.empty());
  CHECK((ends.parameters == expected.parameters));
  for (const auto& began_at : ends.began_at)
    CHECK(began_at == ends.began_at[0]);
}

}  // namespace

TEST_CASE("runs that are kept together resume the newest round that all of them have") {
  using Runs = std::vector<std::vector<RunCommit>>;
  CHECK(chosen({{commit(3, 2, 2), commit(2, 1, 1)}, {commit(3, 2, 2), commit(2, 1, 1)}}) == Numbers{3, 3});
  CHECK(chosen({{commit(3, 2, 2), commit(2, 1, 1)}, {commit(2, 1, 1), commit(1, 0)}}) == Numbers{2, 2});
  CHECK(chosen({{commit(3, 2, 2), commit(2, 1, 1)}, {commit(5, 1), commit(4, 1, 1)}}) == Numbers{2, 5});
  CHECK(chosen({{commit(2, 1, 1), commit(1, 0)}, {commit(1, 0)}}) == Numbers{1, 1});
  CHECK(chosen({{commit(1, 0)}, {}}).empty());
  CHECK(chosen({{}, {}}).empty());
  SECTION("a round of another start is another round") {
    RunCommit other = commit(3, 2, 2);
    other.round.start = 8;
    CHECK(chosen({{commit(3, 2, 2), commit(2, 1, 1)}, {other, commit(2, 1, 1)}}) == Numbers{2, 2});
  }
  SECTION("runs without a round in common are refused") {
    const Runs runs{{commit(5, 4, 4), commit(4, 3, 3)}, {commit(2, 1, 1), commit(1, 0)}};
    CHECK_THROWS_WITH(newest_joint_points(runs, names),
                      Contains("B1009") && Contains("run \"matrices\" has step 4 of round 4 and step 3 of round 3"));
    CHECK_THROWS_WITH(newest_joint_points(Runs{{commit(2, 1, 1)}, {}}, names), Contains("run \"rest\" has no step"));
  }
  SECTION("a run is not resumed without the others") {
    CHECK_THROWS_WITH(newest_joint_points(Runs{{commit(2, 1, 1)}}, names), Contains("all 2 runs"));
  }
}

TEST_CASE("a killed job resumes its runs after the same round, with the bits of one that was not killed") {
  std::mt19937 random(7);
  for (const bool in_backward : {false, true}) {
    std::map<std::uint64_t, std::vector<std::vector<std::byte>>> expected;  // the keys are numbers of rounds
    for (std::size_t attempt = 0; attempt < (sanitized ? 2 : 10); ++attempt) {
      CAPTURE(in_backward, attempt);
      const TemporaryDirectory directory;
      Pair pair{.directory = directory.path(), .in_backward = in_backward};
      train_and_kill(pair, 3 + attempt % 2, std::chrono::microseconds(random() % 2000));
      train_and_kill(pair, attempt % 4, std::chrono::microseconds(random() % 5000));  // kills may come while it resumes
      pair.rounds = 8;
      const Ends ends = train(pair);
      CHECK(ends.began_at[0][0] >= 1);
      CHECK(ends.began_at[0][0] == ends.began_at[0][1]);
      const std::uint64_t rounds = std::max<std::uint64_t>(pair.rounds, ends.began_at[0][0]);
      if (!expected.contains(rounds)) {
        const TemporaryDirectory whole;
        expected[rounds] = train({.directory = whole.path(), .in_backward = in_backward, .rounds = rounds}).parameters;
      }
      check_ends(ends, {.parameters = expected[rounds]});
    }
  }
}

TEST_CASE("a skipped step is committed with its round, and changes nothing") {
  const TemporaryDirectory whole;
  Pair pair{.directory = whole.path(), .skipped = 2};
  const Ends expected = train(pair);
  for (const std::size_t rounds : {3u, 4u}) {
    const TemporaryDirectory directory;
    Pair stopped = pair;
    stopped.directory = directory.path();
    stopped.rounds = rounds;
    train(stopped);
    stopped.rounds = pair.rounds;
    const Ends ends = train(stopped);
    CHECK(ends.began_at[0] == std::vector<std::uint64_t>{rounds, rounds - 1});
    check_ends(ends, expected);
  }
}

TEST_CASE("a run that was kept with others is refused alone") {
  const TemporaryDirectory directory;
  const Pair pair{.directory = directory.path(), .rounds = 2};
  train(pair);
  const auto before = contents(directory.path());
  for (const std::string& failure : failures_of_ranks(
           2, [&](Communicator& world) { Training(two_layers(), world, {optim::AdamW{.lr = 0.02}}, pair.options(0)); }))
    CHECK_THAT(failure, Contains("B1009") && Contains("it is one of 2 that are resumed together"));
  CHECK(contents(directory.path()) == before);
}
