// Tests of trainings on processes as ranks: they give the bits of threads as ranks, and survive the kill of a rank.
#include <catch2/catch.hpp>
#include <csignal>
#include <fstream>
#include <thread>

#include "tests/comm/process_groups.h"
#include "tests/sanitizer.h"
#include "tests/zero/progress_pipe.h"
#include "tests/zero/training_rig.h"

using namespace ballast;
using namespace ballast::testing;
using Catch::Contains;

namespace {

std::vector<std::byte> bytes_of(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  const auto view = std::as_bytes(std::span(bytes));
  return {view.begin(), view.end()};
}

// Trains, and writes each rank's last parameters to a file named by its number.
struct TrainingJob {
  TrainingJob(const Setup& of, HostTransport transport)
      : setup(of), group({of.placement.ranks(), of.ranks_per_host}, transport, patient) {
    setup.keeps_run = true;
    if (setup.directory.empty()) setup.directory = directory.path();
  }

  void as_rank(std::size_t rank) const {
    group.as_rank(rank, [&](Communicator& world) {
      const Outcome outcome = train_rank(setup, world);
      std::ofstream file(setup.directory / std::to_string(rank), std::ios::binary);
      file.write(reinterpret_cast<const char*>(outcome.parameters.data()), std::ssize(outcome.parameters));
    });
  }

  TemporaryDirectory directory;
  Setup setup;
  ProcessGroupRig group;
};

Setup on_drives(std::size_t ranks, std::size_t steps) {
  Setup setup{.placement = placement_of_stage(3, ranks), .steps = steps};
  setup.placement.state = Tier::nvme;
  return setup;
}

Setup with_gradients_in_bf16(Setup setup) {
  setup.gradient_format = GradientFormat::bf16;
  setup.micro_steps = 2;
  return setup;
}

Setup encoded(Setup setup) {
  setup.micro_steps = 2;
  setup.wire = {.gather = WireFormat::int8, .reduce = WireFormat::int8};
  return setup;
}

Setup encoded_on_two_hosts() {
  Setup setup = encoded({.placement = placement_of_stage(3, 4), .model_times = 100});
  setup.wire.across = WireFormat::int4;
  setup.ranks_per_host = 2;
  return setup;
}

// Returns a setup with units so large that ranks of one machine read each other's memory in place.
Setup in_place() {
  return {.placement = placement_of_stage(3, 2),
          .model_times = 450,
          .tile_elements = std::size_t{1} << 16,
          .steps = sanitized ? 1 : 3,
          .offloads = true};
}

}  // namespace

TEST_CASE("processes as ranks give the bits of threads as ranks") {
  Sweep sweep(3);
  for (const ProcessKind& kind : process_kinds()) {
    CAPTURE(kind.name);
    const Setup stage_0{.placement = placement_of_stage(0, 2)};
    for (const Setup& setup : {stage_0, on_drives(3, 4), in_place(), with_gradients_in_bf16(in_place()),
                               with_gradients_in_bf16({.placement = placement_of_stage(0, 3), .model_times = 100}),
                               encoded(in_place()), encoded_on_two_hosts()}) {
      if (!sweep.takes_next()) continue;
      const TrainingJob job(setup, kind.transport);
      const std::size_t ranks = setup.placement.ranks();
      {
        Processes processes(ranks, [&](std::size_t rank) { job.as_rank(rank); });
        CHECK(processes.failures() == Failures(ranks));
      }
      const std::vector<Outcome> expected = train(setup);
      for (std::size_t rank = 0; rank < ranks; ++rank) {
        CHECK((bytes_of(job.setup.directory / std::to_string(rank)) == expected[rank].parameters));
      }
    }
  }
}

TEST_CASE("a killed rank ends the others with its name, and all resume from a common step") {
  const Setup setup = on_drives(3, 60);
  std::vector<std::unique_ptr<TrainingJob>> jobs;
  for (const ProcessKind& kind : process_kinds()) {
    CAPTURE(kind.name);
    TrainingJob& job = *jobs.emplace_back(std::make_unique<TrainingJob>(setup, kind.transport));
    {
      ProgressPipe progress;
      job.setup.progress = progress.writing_end();
      Processes processes(3, [&](std::size_t rank) { job.as_rank(rank); });
      progress.close_writing();
      progress.wait_for_steps(5);
      processes.send(1, SIGKILL);
      CHECK(processes.failure(1) == "signal 9");
      for (const std::size_t survivor : {0u, 2u}) {
        CHECK_THAT(processes.failure(survivor), Contains("B3301") && Contains("rank 1") && Contains("died"));
      }
    }
    job.setup.progress = -1;
    const TrainingJob again(job.setup, kind.transport);  // the directory is the same
    Processes processes(3, [&](std::size_t rank) { again.as_rank(rank); });
    CHECK(processes.failures() == Failures(3));
  }
  const std::vector<Outcome> expected = train(setup);
  for (const auto& job : jobs) {
    for (std::size_t rank = 0; rank < 3; ++rank) {
      CHECK((bytes_of(job->setup.directory / std::to_string(rank)) == expected[rank].parameters));
    }
  }
}
