// Measures kernels and transfers on a GPU. Each case runs in turn with its limit.
#include <fmt/format.h>

#include <cstdio>
#include <iterator>

#include "benchmarks/gpu/cases.h"
#include "benchmarks/harness/record.h"
#include "benchmarks/harness/run_program.h"

namespace ballast::benchmarks {
namespace {

struct Options {
  std::size_t elements = std::size_t{128} << 20;
  std::size_t bytes = std::size_t{512} << 20;
  int gpu = 0;
  Rounds rounds{};
  std::string only{};
  bool list = false;
};

void describe(CLI::App& app, Options& options) {
  app.add_option("--elements", options.elements, "Elements of the kernels' arrays (128 Mi)")
      ->transform(CLI::AsSizeValue(false))
      ->check(CLI::Range(std::size_t{1} << 20, std::size_t{1} << 36));
  app.add_option("--bytes", options.bytes, "Bytes of a transfer (512 MiB)")
      ->transform(CLI::AsSizeValue(false))
      ->check(CLI::Range(std::size_t{1} << 20, std::size_t{1} << 36));
  app.add_option("--gpu", options.gpu, "GPU, by CUDA's number (0)");
  app.add_option("--rounds", options.rounds.count, "Timed rounds of each case (15)")->check(CLI::Range(1, 100000));
  app.add_option("--only", options.only, "Only the cases whose line in --list contains this text");
  app.add_flag("--list", options.list, "Name the cases and stop");
}

std::string line(const GpuCase& item) { return fmt::format("{}, vs. {}", item.name, item.against); }

std::vector<GpuCase> chosen(const Options& options) {
  std::vector<GpuCase> cases = kernel_cases(options.elements);
  std::ranges::move(transfer_cases(options.bytes), std::back_inserter(cases));
  std::erase_if(cases, [&](const GpuCase& item) { return line(item).find(options.only) == std::string::npos; });
  return cases;
}

Measurement measure(const GpuCase& item, TestedGpu& gpu, Rounds rounds) {
  const Subject subjects[] = {item.make(gpu), item.make_against(gpu)};
  const auto runs = alternate(subjects, rounds);
  const Summary summary = summarise(runs[0], runs[1]);
  return {.record = {.suite = "gpu",
                     .name = item.name,
                     .value = summary.value,
                     .unit = "GB/s",
                     .against = item.against,
                     .ratio = summary.ratio},
          .against_value = summary.against_value,
          .spread = summary.spread};
}

void run(const Options& options) {
  TestedGpu gpu(options.gpu);
  for (const GpuCase& item : chosen(options)) {
    fmt::print("{}\n", to_json(measure(item, gpu, options.rounds)));
    std::fflush(stdout);
  }
}

void list(const Options& options) {
  for (const GpuCase& item : chosen(options)) {
    fmt::print("{}\n", line(item));
  }
}

}  // namespace
}  // namespace ballast::benchmarks

int main(int argc, char** argv) {
  using namespace ballast::benchmarks;
  CLI::App app{"Kernels on a GPU, compared with a copy in its memory; transfers, compared with a long one"};
  Options options;
  describe(app, options);
  return run_program(app, argc, argv, [&] { options.list ? list(options) : run(options); });
}
