// A Llama whose ranks are killed resumes from its drives and ends with the bits of an undisturbed one.
#include <catch2/catch.hpp>
#include <csignal>
#include <fstream>
#include <random>
#include <thread>

#include "tests/comm/process_groups.h"
#include "tests/llama/training_rig.h"
#include "tests/zero/progress_pipe.h"

using namespace ballast;
using namespace ballast::testing;

namespace {

constexpr std::size_t ranks = 3;

benchmarks::RunOptions run_on_drives(const std::filesystem::path& directory) {
  benchmarks::RunOptions run = tiny_run();
  run.steps = 40;
  run.training.state = Tier::nvme;
  run.training.drives = {.directories = {directory}, .run = "killed"};
  return run;
}

struct DriveJob {
  explicit DriveJob(const std::filesystem::path& in)
      : directory(in), group(ranks, process_kinds().front().transport, patient) {}

  // Rank 0 reports its progress. Each rank writes a hash of its parameters to a file.
  void as_rank(std::size_t rank, int progress) const {
    const auto report = [=](const benchmarks::Start&, const benchmarks::Step&) {
      if (rank == 0 && progress >= 0 && ::write(progress, "s", 1) != 1)
        throw std::runtime_error("cannot report progress: the reader is gone");
    };
    group.as_rank(rank, [&](Communicator& world) {
      const auto maths = llama::cpu_maths(1);
      const std::uint64_t hash = benchmarks::train(run_on_drives(directory), world, *maths, report);
      std::ofstream(directory / std::to_string(rank)) << hash;
    });
  }

  void to_its_end() const {
    Processes processes(ranks, [&](std::size_t rank) { as_rank(rank, -1); });
    CHECK(processes.failures() == Failures(ranks));
  }

  // The victims are killed a moment after the nth step from here on.
  void until_killed(const std::vector<std::size_t>& victims, std::size_t steps,
                    std::chrono::microseconds moment) const {
    ProgressPipe progress;
    Processes processes(ranks, [&](std::size_t rank) { as_rank(rank, progress.writing_end()); });
    progress.close_writing();
    progress.wait_for_steps(steps);
    std::this_thread::sleep_for(moment);
    for (const std::size_t victim : victims) {
      processes.send(victim, SIGKILL);
    }
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      CHECK(!processes.failure(rank).empty());
    }
  }

  std::vector<std::string> hashes() const {
    std::vector<std::string> read(ranks);
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      std::ifstream(directory / std::to_string(rank)) >> read[rank];
    }
    return read;
  }

  std::filesystem::path directory;
  ProcessGroupRig group;
};

}  // namespace

// The processes are forked before this one has threads of its own.
TEST_CASE("a Llama whose ranks were killed, one or all, ends with the bits of an undisturbed training") {
  const TemporaryDirectory killed, left_alone;
  std::mt19937 random(5);
  for (const std::vector<std::size_t>& victims : std::vector<std::vector<std::size_t>>{{0}, {1}, {2}, {0, 1, 2}}) {
    CAPTURE(victims);
    DriveJob(killed.path()).until_killed(victims, 2 + random() % 5, std::chrono::microseconds(random() % 3000));
  }
  const DriveJob after(killed.path()), undisturbed(left_alone.path());
  after.to_its_end();
  undisturbed.to_its_end();
  CHECK(after.hashes() == undisturbed.hashes());
  CHECK(after.hashes() == std::vector<std::string>(ranks, after.hashes().front()));
  const Outcome in_memory = train_llama(run_on_drives(TemporaryDirectory().path()), ranks);
  CHECK(after.hashes().front() == std::to_string(in_memory.parameters));
}
