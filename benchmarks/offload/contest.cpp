#include "benchmarks/offload/contest.h"

#include <ballast/error.h>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/resource.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>

#include "benchmarks/harness/suite.h"

namespace ballast::benchmarks {
namespace {

constexpr std::size_t layouts = 4;  // layouts of files; an even number, so that half of them are in each order

double cpu_seconds() {
  struct rusage used {};
  ::getrusage(RUSAGE_SELF, &used);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
  };
  return seconds(used.ru_utime) + seconds(used.ru_stime);
}

// Runs a shell command to its end, and returns its standard output.
std::string output_of(const std::string& command) {
  struct Close {
    void operator()(std::FILE* pipe) const { ::pclose(pipe); }
  };
  const std::unique_ptr<std::FILE, Close> pipe(::popen(command.c_str(), "r"));
  std::string text;
  std::array<char, 4096> part{};
  while (const std::size_t read = std::fread(part.data(), 1, part.size(), pipe.get())) {
    text.append(part.data(), read);
  }
  return text;
}

const std::map<std::string, std::string> engines{
    {"io_uring", "--ioengine=io_uring --fixedbufs=1 --registerfiles=1"},
    {"libaio", "--ioengine=libaio"},
    {"threads", "--ioengine=psync --thread=1"},
};

std::string command(const FioJob& job, const std::string& engine) {
  std::vector<std::string> names;
  for (const auto& file : job.files) {
    names.push_back(file.string());
  }
  // Threads have one request each, and share the work: each has its own part of the files.
  const std::string work = engine == "threads"
                               ? fmt::format("--numjobs={} --size={} --offset_increment={}", job.depth,
                                             job.bytes / job.depth, job.bytes / job.depth / job.files.size())
                               : fmt::format("--iodepth={} --size={}", job.depth, job.bytes);
  // Huge pages under its buffers too: drives take fewer and longer requests from them.
  return fmt::format(
      "GLIBC_TUNABLES=glibc.malloc.hugetlb=1 fio --name=job --filename={} --rw={} --bs={} {} {} --direct=1 "
      "--overwrite=1 --scramble_buffers=0 --allow_file_create=0 --fallocate=none --group_reporting --output-format=json 2>/dev/null",
      fmt::join(names, ":"), job.direction, job.block_bytes, engines.at(engine), work);
}

}  // namespace

Sample timed(const std::function<void()>& run) {
  const double cpu = cpu_seconds();
  const auto start = std::chrono::steady_clock::now();
  run();
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  return {took.count(), cpu_seconds() - cpu};
}

void run_contest(const Contest& contest, std::size_t rounds) {
  Runs ours{.work = contest.gigabytes};
  Runs theirs{.work = contest.gigabytes};
  Runs our_cpu{.work = contest.gigabytes};
  Runs their_cpu{.work = contest.gigabytes};
  const std::size_t in_a_row = (rounds + layouts - 1) / layouts + 1;  // one of them to warm up
  for (std::size_t round = 0; round < layouts * in_a_row; ++round) {
    if (contest.renew && round > 0 && round % in_a_row == 0) contest.renew();
    const Sample us = contest.ours.run();
    const Sample them = contest.theirs.run();
    if (round % in_a_row == 0) continue;
    ours.seconds.push_back(us.seconds);
    theirs.seconds.push_back(them.seconds);
    our_cpu.seconds.push_back(us.cpu_seconds);
    their_cpu.seconds.push_back(them.cpu_seconds);
  }
  emit("offload", contest.name, "GB/s", contest.theirs.name, summarise(ours, theirs));
  if (!contest.compares_cpu) return;
  emit("offload", contest.name + ", by CPU time", "GB/CPU s", contest.theirs.name, summarise(our_cpu, their_cpu));
}

bool has_fio() { return std::system("fio --version >/dev/null 2>&1") == 0; }

Sample run_fio(const FioJob& job, const std::string& engine) {
  const std::string text = output_of(command(job, engine));
  const auto begin = text.find('{');  // a warning may stand before it
  require(begin != std::string::npos, Code::internal,
          [&] { return Problem{.what = "fio failed", .where = command(job, engine)}; });
  const auto run = nlohmann::json::parse(text.substr(begin))["jobs"][0];
  double bytes = 0;
  double seconds = 0;
  for (const char* direction : {"read", "write"}) {
    bytes += run[direction]["io_bytes"].get<double>();
    seconds = std::max(seconds, run[direction]["runtime"].get<double>() * 1e-3);
  }
  // fio gives whole milliseconds, and the processor time as a part of them.
  const double cpu = (run["usr_cpu"].get<double>() + run["sys_cpu"].get<double>()) / 100;
  const double scale = static_cast<double>(job.bytes) / bytes;
  const double jobs = engine == "threads" ? static_cast<double>(job.depth) : 1;
  return {seconds * scale, seconds * cpu * jobs * scale};
}

std::string best_engine(const FioJob& job) {
  std::string best;
  double least = 0;
  for (const auto& [engine, options] : engines) {
    const double seconds = std::min(run_fio(job, engine).seconds, run_fio(job, engine).seconds);
    if (best.empty() || seconds < least) {
      best = engine;
      least = seconds;
    }
  }
  return best;
}

Sample run_deepspeed(const std::string& command) {
  const std::string text = output_of(command + " 2>/dev/null");
  require(!text.empty(), Code::internal,
          [&] { return Problem{.what = "DeepSpeed's async_io could not be measured", .where = command}; });
  const auto sample = nlohmann::json::parse(text);
  return {sample["seconds"].get<double>(), sample["cpu_seconds"].get<double>()};
}

}  // namespace ballast::benchmarks
