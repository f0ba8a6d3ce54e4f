#include "benchmarks/offload/fio.h"

#include <ballast/error.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstdlib>
#include <map>
#include <nlohmann/json.hpp>

#include "benchmarks/offload/program.h"

namespace ballast::benchmarks {
namespace {

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

}  // namespace ballast::benchmarks
