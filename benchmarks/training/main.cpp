// Trains a Llama of a chosen shape on made-up sequences. Rank 0 writes a line of JSON for each step: time, memory and forecast.
#include <ballast/comm.h>
#include <ballast/error.h>

#include <fmt/format.h>

#include <cstdio>
#include <nlohmann/json.hpp>

#include "benchmarks/harness/suite.h"
#include "benchmarks/training/run.h"

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
                              {"forward_share", step.forward_share}};
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
  if (start.forecast_seconds) line["forecast_seconds"] = *start.forecast_seconds;
  if (!step.result.reason.empty()) line["skipped"] = step.result.reason;
  return line;
}

void train_rank(RunOptions options, Communicator& world) {
  const auto report = [&](const Start& start, const Step& step) {
    if (world.rank() == 0) print(line_of(start, step, options.before));
  };
  try {
    const auto maths = llama::maths_of(options, world);
    const std::uint64_t hash = train(options, world, *maths, report);
    if (options.hashes_parameters && world.rank() == 0) print({{"parameters_hash", fmt::format("{:016x}", hash)}});
  } catch (const std::bad_alloc&) {  // malloc gives no more information
    fail(Code::host_memory, {.what = "malloc has no more memory"});
  }
}

}  // namespace
}  // namespace ballast::benchmarks

int main(int argc, char** argv) {
  using namespace ballast::benchmarks;
  CLI::App app{"Trains a Llama, and writes the memory, the time and the forecast of its steps"};
  RunOptions options;
  describe(app, options);
  int failed = 0;
  const int refused = run_program(app, argc, argv, [&] {
    options.before = resident_memory();
    failed = ballast::run_ranks(options.ranks, [&](ballast::Communicator& world) { train_rank(options, world); });
  });
  return refused > 0 || failed > 0 ? 2 : 0;
}
