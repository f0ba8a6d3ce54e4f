#include "benchmarks/harness/suite.h"

#include <ballast/error.h>

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <iterator>
#include <new>
#include <nlohmann/json.hpp>

#include "kernels/runtime/machine.h"

namespace ballast::benchmarks {
namespace {

struct Options {
  std::size_t elements = 64'000'000;
  int threads = static_cast<int>(usable_cores());
  Choice choice{};
};

void describe(CLI::App& app, Options& options) {
  app.add_option("--elements", options.elements, "Elements of the large cases (64 million)")
      ->transform(CLI::AsSizeValue(false))
      ->check(CLI::Range(std::size_t{1}, std::size_t{1} << 40));
  app.add_option("--threads", options.threads, "Threads; by default the cores that this process may use")
      ->check(CLI::Range(1, 4096));
  describe(app, options.choice);
}

// Measures and emits the limits. Returns the fastest method of copying.
Copy measure_limits(const std::string& suite, Limits& limits, std::size_t bytes, Rounds rounds) {
  std::vector<Subject> subjects;
  std::vector<std::string> names;
  const auto add = [&](std::string_view name, Subject subject) {
    names.emplace_back(name);
    subjects.push_back(std::move(subject));
  };
  for (const Copy& copy : all_copies)
    add(copy.name, limits.copy(copy, bytes));
  add("scale in place", limits.scale(bytes));
  add("read", limits.read(bytes));

  std::vector<double> medians;
  for (const Rates& rates : alternate(subjects, rounds)) {
    emit(suite, names[medians.size()], "GB/s", rates);
    medians.push_back(median(rates));
  }
  const auto best = std::max_element(medians.begin(), medians.begin() + all_copies.size());
  return all_copies[static_cast<std::size_t>(best - medians.begin())];
}

std::string line(const Trial& trial) { return fmt::format("{}, vs. {}", trial.name, trial.against); }

std::vector<Trial> chosen(const std::string& suite, const std::vector<Trial>& trials, const std::string& part_of_line) {
  std::vector<Trial> found;
  std::ranges::copy_if(trials, std::back_inserter(found),
                       [&](const Trial& trial) { return line(trial).find(part_of_line) != std::string::npos; });
  require(!found.empty(), Code::bad_argument, [&] {
    return Problem{.what = fmt::format("no case of suite {} has \"{}\" in its line", suite, part_of_line),
                   .remedy = "--list names the cases"};
  });
  return found;
}

void run(const Suite& suite, const Options& options) {
  Setting setting{.elements = options.elements};
  const std::vector<Trial> trials = suite.trials(setting);
  chosen(suite.name, trials, options.choice.only);  // throws before anything is measured
  if (!options.choice.list) {
    const std::size_t bytes = options.elements * suite.most_bytes_of_an_element;
    setting.limits.emplace(bytes, setting.threads.emplace(options.threads));
    setting.copy = measure_limits(suite.name, *setting.limits, bytes / 2, options.choice.rounds);
  }
  run_trials(suite.name, trials, options.choice);
}

}  // namespace

void emit(const std::string& suite, const std::string& name, const std::string& unit, const Rates& rates,
          const std::string& against, const Rates& against_rates) {
  const nlohmann::ordered_json line{{"suite", suite}, {"case", name},       {"unit", unit},
                                    {"rates", rates}, {"against", against}, {"against_rates", against_rates}};
  fmt::print("{}\n", line.dump());
  std::fflush(stdout);
}

void describe(CLI::App& app, Choice& choice) {
  app.add_option("--rounds", choice.rounds.count, "Timed rounds of each case (15)")->check(CLI::Range(1, 100000));
  app.add_option("--warm-up", choice.rounds.warm_up, "Rounds before them (2)");
  app.add_option("--only", choice.only, "Only the cases whose line in --list contains this text");
  app.add_flag("--list", choice.list, "Name the cases and stop");
}

void run_trials(const std::string& suite, const std::vector<Trial>& trials, const Choice& choice) {
  for (const Trial& trial : chosen(suite, trials, choice.only)) {
    if (choice.list) {
      fmt::print("{}\n", line(trial));
      continue;
    }
    const Pair pair = trial.make();
    const Subject subjects[] = {pair.subject, pair.against};
    const std::vector<Rates> rates = alternate(subjects, choice.rounds);
    emit(suite, trial.name, trial.unit, rates[0], trial.against, rates[1]);
  }
}

int run_program(CLI::App& app, int argc, char** argv, const std::function<void()>& run) {
  try {
    app.parse(argc, argv);
    run();
    return 0;
  } catch (const CLI::ParseError& problem) {
    return app.exit(problem) == 0 ? 0 : 2;
  } catch (const std::bad_alloc&) {  // malloc gives no more information
    fmt::print(stderr, "{}\n", Error(Code::host_memory, {.what = "malloc got no more memory"}, Site::here()).what());
    return 2;
  } catch (const std::exception& problem) {
    fmt::print(stderr, "{}\n", problem.what());
    return 2;
  }
}

int run_suite(const Suite& suite, int argc, char** argv) {
  CLI::App app{suite.description};
  Options options;
  describe(app, options);
  return run_program(app, argc, argv, [&] { run(suite, options); });
}

}  // namespace ballast::benchmarks
