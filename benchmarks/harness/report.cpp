// The program behind every suite. It reads measurements as lines of JSON from stdin, prints the table, and writes and
// compares records. Exit codes: 0 if all is well, 1 if something is worse than recorded, 2 for wrong arguments and
// errors.
#include <ballast/error.h>

#include <fmt/format.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iostream>

#include "benchmarks/harness/baseline.h"
#include "benchmarks/harness/machine.h"
#include "benchmarks/harness/run_program.h"
#include "benchmarks/harness/table.h"

namespace {

using namespace ballast;
using namespace ballast::benchmarks;

struct Options {
  std::string json{};
  std::string record{};
  std::string compare{};
  std::string commit = "unknown";
  std::string command{};
  double tolerance = 0.1;
};

void describe(CLI::App& app, Options& options) {
  app.add_option("--json", options.json, "Write one line of JSON for each case");
  app.add_option("--record", options.record, "The same, after a line with the command and the date: a baseline");
  app.add_option("--compare", options.compare, "Report what is worse than in this baseline")->check(CLI::ExistingFile);
  app.add_option("--tolerance", options.tolerance, "How much of a recorded ratio may be lost")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  app.add_option("--commit", options.commit, "The commit that is measured");
  app.add_option("--command", options.command, "The command that a record names");
}

// Prints each case as it arrives.
std::vector<Record> show(std::istream& in, const Options& options) {
  const auto machine = machine_name(detect_machine());
  fmt::print("  {}, commit {}\n", machine, options.commit);
  std::vector<Record> records;
  for (std::string line; std::getline(in, line);) {
    auto measurement = measurement_from_json(line, "standard input");
    measurement.record.machine = machine;
    measurement.record.commit = options.commit;
    fmt::print("{}\n", row(measurement));
    std::fflush(stdout);
    records.push_back(std::move(measurement.record));
  }
  return records;
}

void write(const std::string& file, const std::string& header, const std::vector<Record>& records) {
  if (const auto folder = std::filesystem::path(file).parent_path(); !folder.empty()) {
    std::filesystem::create_directories(folder);
  }
  std::ofstream out(file);
  out << header;
  for (const auto& record : records) {
    out << to_json(record) << '\n';
  }
  out.close();
  require(!out.fail(), Code::bad_argument,
          [&] { return Problem{.what = "a file of benchmark records could not be written", .where = file}; });
}

int compare_with(const std::string& file, const std::vector<Record>& records, double tolerance) {
  std::ifstream in(file);
  const auto baseline = read_baseline(in, file);
  fmt::print("\nCompared with {} ({}{}), tolerance {:.0f} %:\n", file,
             baseline.date.empty() ? "no date" : baseline.date, baseline.command.empty() ? "" : ", " + baseline.command,
             100 * tolerance);
  if (!records.empty() && !baseline.records.empty() && records[0].machine != baseline.records[0].machine) {
    fmt::print("  recorded on another machine: {}\n", baseline.records[0].machine);
  }
  const auto findings = compare(baseline.records, records, tolerance);
  for (const auto& finding : findings) {
    fmt::print("  {}\n", describe(finding));
  }
  fmt::print("  {}\n", any_worse(findings) ? "Worse than recorded." : "Nothing is worse than recorded.");
  return any_worse(findings) ? 1 : 0;
}

int report(const Options& options) {
  const auto records = show(std::cin, options);
  if (!options.json.empty()) {
    write(options.json, "", records);
  }
  if (!options.record.empty()) {
    write(options.record, baseline_header(options.command, today()) + '\n', records);
  }
  return options.compare.empty() ? 0 : compare_with(options.compare, records, options.tolerance);
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Prints, records and compares the measurements that a benchmark suite writes"};
  Options options;
  describe(app, options);
  int exit_code = 0;
  const int failed = ballast::benchmarks::run_program(app, argc, argv, [&] { exit_code = report(options); });
  return failed != 0 ? failed : exit_code;
}
