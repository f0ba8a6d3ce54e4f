#include "zero/comm/launch.h"

#include <ballast/error.h>

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <vector>

namespace ballast {
namespace {

// torch has its store at MASTER_PORT itself: that of torchrun or of init_process_group().
constexpr std::int64_t ports_above_master = 111;
constexpr std::int64_t last_port = 65535;
// From this port on, systems assign ports to outgoing connections, so any of them may be in use. torchrun chooses its
// MASTER_PORT there.
constexpr std::int64_t first_handed_out = 32768;
constexpr std::int64_t own_ports = 20000;  // used when no variable names a port
constexpr std::int64_t number_of_own_ports = 12000;
constexpr std::string_view loopback = "127.0.0.1";

// The variables of a launcher.
struct Names {
  std::string_view launcher;
  std::string_view sign;  // set whenever this launcher runs
  std::string_view rank;
  std::string_view size;
  std::string_view local_rank;
  std::string_view local_size;        // the number of ranks on this machine; empty: the launcher does not say
  std::vector<std::string_view> job;  // these distinguish jobs
};

// If Slurm started mpirun or torchrun, its variables are set as well. In a batch script, which is one process, all of
// them but those of the step are set.
const std::vector<Names>& launchers() {
  static const std::vector<Names> all{
      {"torchrun",
       "TORCHELASTIC_RUN_ID",
       "RANK",
       "WORLD_SIZE",
       "LOCAL_RANK",
       "LOCAL_WORLD_SIZE",
       {"TORCHELASTIC_RUN_ID"}},
      {"RANK", "RANK", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", {}},
      {"Open MPI",
       "OMPI_COMM_WORLD_RANK",
       "OMPI_COMM_WORLD_RANK",
       "OMPI_COMM_WORLD_SIZE",
       "OMPI_COMM_WORLD_LOCAL_RANK",
       "OMPI_COMM_WORLD_LOCAL_SIZE",
       {"PMIX_NAMESPACE"}},
      {"Slurm",
       "SLURM_STEP_ID",
       "SLURM_PROCID",
       "SLURM_NTASKS",
       "SLURM_LOCALID",
       "",
       {"SLURM_JOB_ID", "SLURM_STEP_ID"}},
  };
  return all;
}

class Reader {
 public:
  Reader(const Environment& environment, const Names& names, std::size_t times_before)
      : environment_(environment), names_(names), times_before_(static_cast<std::int64_t>(times_before)) {}

  Launch read() const {
    Launch launch{.launcher = std::string(names_.launcher),
                  .rank = number(names_.rank),
                  .size = number(names_.size),
                  .local_rank = static_cast<std::size_t>(integer(names_.local_rank).value_or(0))};
    require(launch.rank < launch.size, Code::bad_environment, [&] {
      return Problem{.what = fmt::format("cannot use {}={} in a world of {}", names_.rank, launch.rank, launch.size),
                     .needed = fmt::format("a rank below {}={}", names_.size, launch.size)};
    });
    launch.job = job();
    launch.hub = {address(launch.size), port(launch.job)};
    return launch;
  }

 private:
  std::optional<std::string> text(std::string_view name) const { return environment_.text(std::string(name)); }
  std::optional<std::int64_t> integer(std::string_view name) const { return environment_.integer(std::string(name)); }
  [[noreturn]] void refuse(std::string what, std::string needed) const {
    fail(Code::bad_environment,
         {.what = std::move(what), .where = std::string(names_.launcher), .needed = std::move(needed)});
  }

  std::size_t number(std::string_view name) const {
    const auto value = integer(name);
    if (!value)
      refuse(fmt::format("cannot connect: {} is not set", name), fmt::format("{}, as {} is", name, names_.sign));
    if (*value < 0) refuse(fmt::format("{}={}", name, *value), "a number from 0 on");
    return static_cast<std::size_t>(*value);
  }

  std::string job() const {
    if (const auto given = text("BALLAST_JOB")) return *given;
    std::string job;
    for (const std::string_view name : names_.job) {
      if (!job.empty()) job += '.';
      job += text(name).value_or("");
    }
    return job;
  }

  std::string address(std::size_t size) const {
    if (const auto given = text("MASTER_ADDR")) return *given;
    if (size == on_this_machine() || names_.launcher == "RANK") return std::string(loopback);
    if (names_.launcher == "Slurm") return first_host();
    refuse("cannot connect: MASTER_ADDR is not set, and not all ranks are on one machine",
           "the address of the machine of rank 0");
  }

  std::size_t on_this_machine() const {
    if (names_.launcher == "Open MPI") {
      return static_cast<std::size_t>(integer(names_.local_size).value_or(0));
    }
    if (names_.launcher == "Slurm" && integer("SLURM_STEP_NUM_NODES").value_or(0) == 1) return number(names_.size);
    return 0;
  }

  // "node[07-12,3],other" is a list that begins with node07, where Slurm puts the first rank.
  std::string first_host() const {
    const auto list = text("SLURM_STEP_NODELIST");
    if (!list) refuse("cannot connect: SLURM_STEP_NODELIST is not set", "it, or MASTER_ADDR");
    const std::size_t end = list->find_first_of(",[");
    std::string host = list->substr(0, end);
    if (end == std::string::npos || (*list)[end] == ',') return host;
    return host + list->substr(end + 1, list->find_first_of(",-]", end) - end - 1);
  }

  std::uint16_t port(const std::string& job) const {
    if (const auto given = checked_port("BALLAST_PORT")) {
      return static_cast<std::uint16_t>((*given - 1 + times_before_) % last_port + 1);
    }
    const auto master = checked_port("MASTER_PORT");
    if (!master) return own_port(job);
    const std::int64_t candidate = *master + ports_above_master;
    const bool is_free = times_before_ == 0 &&
                         candidate < first_handed_out;  // the next port belongs to the job with the next MASTER_PORT
    return is_free ? static_cast<std::uint16_t>(candidate) : own_port(fmt::format("{}.{}", job, *master));
  }

  std::optional<std::int64_t> checked_port(std::string_view name) const {
    const auto port = integer(name);
    if (port && (*port < 1 || *port > last_port)) refuse(fmt::format("{}={}", name, *port), "a port, 1 to 65535");
    return port;
  }

  // Different jobs get different ports, in most cases.
  std::uint16_t own_port(const std::string& job) const {
    std::uint32_t hash = 2166136261;  // FNV-1a
    for (const char letter : job) {
      hash = (hash ^ static_cast<unsigned char>(letter)) * 16777619;
    }
    return static_cast<std::uint16_t>(own_ports + (hash + times_before_) % number_of_own_ports);
  }

  const Environment& environment_;
  const Names& names_;
  std::int64_t times_before_;
};

}  // namespace

Launch launch_from(const Environment& environment, std::size_t times_before) {
  const auto present = std::ranges::find_if(
      launchers(), [&](const Names& names) { return environment.text(std::string(names.sign)).has_value(); });
  if (present == launchers().end()) return {};
  return Reader(environment, *present, times_before).read();
}

bool has_other_hosts(const Launch& launch, const Environment& environment) {
  const auto names = std::ranges::find(launchers(), launch.launcher, &Names::launcher);
  if (names == launchers().end()) return false;
  if (names->local_size.empty()) return environment.integer("SLURM_STEP_NUM_NODES").value_or(1) > 1;
  const auto here = environment.integer(std::string(names->local_size));
  return here && *here > 0 && static_cast<std::size_t>(*here) < launch.size;
}

}  // namespace ballast
