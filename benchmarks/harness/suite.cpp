#include "benchmarks/harness/suite.h"

#include <ballast/error.h>

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <iterator>

#include "benchmarks/harness/record.h"
#include "benchmarks/harness/run_program.h"
#include "kernels/runtime/cores.h"

namespace ballast::benchmarks {
namespace {

struct Options {
  std::size_t elements = 64'000'000;
  int threads = static_cast<int>(usable_cores());
  Rounds rounds{};
  std::string only{};
  bool list = false;
};

void describe(CLI::App& app, Options& options) {
  app.add_option("--elements", options.elements, "Elements of the large cases (64 million)")
      ->transform(CLI::AsSizeValue(false))
      ->check(CLI::Range(std::size_t{1}, std::size_t{1} << 40));
  app.add_option("--threads", options.threads, "Threads; by default the cores that this process may use")
      ->check(CLI::Range(1, 4096));
  app.add_option("--rounds", options.rounds.count, "Timed rounds of each case (15)")->check(CLI::Range(1, 100000));
  app.add_option("--warm-up", options.rounds.warm_up, "Rounds before them (2)");
  app.add_option("--only", options.only, "Only the cases whose line in --list contains this text");
  app.add_flag("--list", options.list, "Name the cases and stop");
}

void emit(const Measurement& measurement) {
  fmt::print("{}\n", to_json(measurement));
  std::fflush(stdout);
}

// Measures and emits the limits. Returns the fastest method of copying.
Copy measure_limits(const std::string& suite, Limits& limits, std::size_t bytes, Rounds rounds) {
  std::vector<Subject> subjects;
  std::vector<std::string_view> names;
  for (const Copy copy : all_copies) {
    subjects.push_back(limits.copy(copy, bytes));
    names.push_back(name(copy));
  }
  subjects.push_back(limits.triad(bytes));
  names.push_back("triad");
  subjects.push_back(limits.scale(bytes));
  names.push_back("scale in place");
  subjects.push_back(limits.read(bytes));
  names.push_back("read");

  std::vector<double> medians;
  for (const auto& runs : alternate(subjects, rounds)) {
    const auto reached = rates(runs);
    const auto text = std::string(names[medians.size()]);
    medians.push_back(median(reached));
    emit(
        {.record = {.suite = suite, .name = text, .value = medians.back(), .unit = "GB/s"}, .spread = spread(reached)});
  }
  const auto best = std::max_element(medians.begin(), medians.begin() + std::size(all_copies));
  return all_copies[best - medians.begin()];
}

Measurement measure(const std::string& suite, const Case& item, const Setting& setting, Rounds rounds) {
  const auto subject = item.make(setting);
  const Subject subjects[] = {subject, item.make_against(setting, subject.work)};
  const auto runs = alternate(subjects, rounds);
  const auto summary = summarise(runs[0], runs[1]);
  return {.record = {.suite = suite,
                     .name = item.name,
                     .value = summary.value,
                     .unit = item.unit,
                     .against = item.against,
                     .ratio = summary.ratio},
          .against_value = summary.against_value,
          .spread = summary.spread};
}

std::string line(const Case& item) { return fmt::format("{}, vs. {}", item.name, item.against); }

std::vector<Case> chosen(const Suite& suite, const std::string& part_of_line) {
  std::vector<Case> cases;
  std::ranges::copy_if(suite.cases, std::back_inserter(cases),
                       [&](const Case& item) { return line(item).find(part_of_line) != std::string::npos; });
  require(!cases.empty(), Code::bad_argument, [&] {
    return Problem{.what = fmt::format("no case of suite {} has \"{}\" in its line", suite.name, part_of_line),
                   .remedy = "--list names the cases"};
  });
  return cases;
}

void run(const Suite& suite, const Options& options) {
  const auto cases = chosen(suite, options.only);
  const Threads threads(options.threads);
  const std::size_t bytes = options.elements * suite.most_bytes_of_an_element;
  Limits limits(bytes, threads);
  const Copy copy = measure_limits(suite.name, limits, bytes / 2, options.rounds);
  const Setting setting{threads, limits, options.elements, copy};
  for (const auto& item : cases) {
    emit(measure(suite.name, item, setting, options.rounds));
  }
}

void list(const Suite& suite) {
  for (const auto& item : suite.cases) {
    fmt::print("{}\n", line(item));
  }
}

}  // namespace

int run_suite(const Suite& suite, int argc, char** argv) {
  CLI::App app{suite.description};
  Options options;
  describe(app, options);
  return run_program(app, argc, argv, [&] { options.list ? list(suite) : run(suite, options); });
}

}  // namespace ballast::benchmarks
