// Trains a Llama of a chosen shape on made-up sequences. Rank 0 writes a line of JSON for each step: time, memory and forecast.
#include <ballast/comm.h>
#include <ballast/error.h>

#include <fmt/format.h>

#include <cstdio>
#include <nlohmann/json.hpp>

#include "benchmarks/harness/suite.h"
#include "benchmarks/training/run.h"
#include "kernels/runtime/machine.h"
#include "zero/comm/connect.h"

namespace ballast::benchmarks {
namespace {

void print(const nlohmann::ordered_json& line) {
  fmt::print("{}\n", line.dump());
  std::fflush(stdout);
}

// Losses and norms keep all their bits.
nlohmann::ordered_json line_of(const Start& start, const Step& step, const ResidentMemory& before) {
  nlohmann::ordered_json line{{"step", step.step},
                              {"loss", step.loss},
                              {"grad_norm", step.result.norm},
                              {"seconds", step.seconds},
                              {"tokens_per_second", step.tokens_per_second},
                              {"parameters", start.parameters}};
  for (std::size_t tier = 0; tier < tier_count; ++tier) {
    line["bytes"][std::string(name(static_cast<Tier>(tier)))] = step.bytes[tier];
  }
  constexpr const char* phases[] = {"forward", "backward", "step"};
  for (std::size_t phase = 0; phase < phase_count; ++phase) {
    line["exposed_seconds"][phases[phase]] = step.result.metrics.exposed[phase];
  }
  line["resident"] = {{"peak_bytes", step.resident.peak},
                      {"code_bytes", step.resident.of_files},
                      {"before_bytes", before.now - before.of_files},
                      {"announced_bytes", start.announced_bytes}};
  if (const DriveWork& work = start.drive_work; work.record_bytes > 0) {
    line["drive"] = {{"read_bytes", work.read_bytes},
                     {"written_bytes", work.written_bytes},
                     {"record_bytes", work.record_bytes},
                     {"records", work.records}};
  }
  if (start.forecast) {
    line["forecast_seconds"] = start.forecast->seconds;
    line["forward_share"] = start.forecast->forward_share;
  }
  if (!step.result.reason.empty()) line["skipped"] = step.result.reason;
  return line;
}

int threads_of(const RunOptions& options, std::size_t ranks_here) {
  const auto share = std::max<std::size_t>(1, usable_cores() / ranks_here);
  return options.training.threads > 0 ? options.training.threads : static_cast<int>(share);
}

void train_rank(RunOptions options, Communicator& world) {
  options.training.threads = threads_of(options, world.size());
  const auto report = [&](const Start& start, const Step& step) {
    if (world.rank() == 0) print(line_of(start, step, options.before));
  };
  try {
    const auto maths = options.on_gpu ? llama::gpu_maths(world.rank()) : llama::cpu_maths(options.training.threads);
    const std::uint64_t hash = train(options, world, *maths, report);
    if (options.hashes_parameters && world.rank() == 0) print({{"parameters_hash", fmt::format("{:016x}", hash)}});
  } catch (const std::bad_alloc&) {  // malloc gives no more information
    fail(Code::host_memory, {.what = "malloc has no more memory"});
  }
}

int run(RunOptions options) {
  options.before = resident_memory();
  const Launch launch = launch_from(Environment());
  require(launch.size == 1 || options.ranks == 1, Code::bad_argument, [&] {
    return Problem{.what = fmt::format("cannot use --ranks in a process that {} started", launch.launcher),
                   .remedy = "leave --ranks out, or start only one process"};
  });
  const auto as_rank = [&](Communicator& world) { train_rank(options, world); };
  return run_ranks(options.ranks, as_rank, {.threads = threads_of(options, launch.size)}) == 0 ? 0 : 2;
}

}  // namespace
}  // namespace ballast::benchmarks

int main(int argc, char** argv) {
  using namespace ballast::benchmarks;
  CLI::App app{"Trains a Llama, and writes the memory, the time and the forecast of its steps"};
  RunOptions options;
  describe(app, options);
  int failed = 0;
  const int refused = run_program(app, argc, argv, [&] { failed = run(options); });
  return refused > 0 ? refused : failed;
}
