#include "zero/comm/connect.h"

#include <ballast/error.h>

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "zero/comm/process_transport.h"
#include "zero/comm/shared_memory.h"
#include "zero/comm/thread_communicator.h"
#include "zero/comm/transport.h"

namespace ballast {
namespace {

// torch has its store at MASTER_PORT itself: that of torchrun or of init_process_group().
constexpr std::int64_t ports_above_master = 111;
constexpr std::int64_t last_port = 65535;
// Systems assign this port and higher ones to outgoing connections, so any of them may be in use. torchrun chooses its
// MASTER_PORT there.
constexpr std::int64_t first_handed_out = 32768;
constexpr std::int64_t own_ports = 20000;  // used when no variable names a port
constexpr std::int64_t number_of_own_ports = 12000;
constexpr std::string_view loopback = "127.0.0.1";

// The variables of a launcher.
struct Names {
  std::string launcher;
  std::string sign;  // set whenever this launcher runs
  std::string rank;
  std::string size;
  std::string local_rank;
  std::string local_size;        // the number of ranks on this machine; empty: the launcher does not say
  std::vector<std::string> job;  // these distinguish jobs
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
    Launch launch{.launcher = names_.launcher,
                  .rank = number(names_.rank),
                  .size = number(names_.size),
                  .local_rank = static_cast<std::size_t>(environment_.integer(names_.local_rank).value_or(0))};
    require(launch.rank < launch.size, Code::bad_environment, [&] {
      return Problem{.what = fmt::format("cannot use {}={} in a world of {}", names_.rank, launch.rank, launch.size),
                     .needed = fmt::format("a rank below {}={}", names_.size, launch.size)};
    });
    launch.job = job();
    launch.hub = {address(launch.size), port(launch.job)};
    return launch;
  }

 private:
  [[noreturn]] void refuse(std::string what, std::string needed) const {
    fail(Code::bad_environment, {.what = std::move(what), .where = names_.launcher, .needed = std::move(needed)});
  }

  std::size_t number(const std::string& name) const {
    const auto value = environment_.integer(name);
    if (!value)
      refuse(fmt::format("cannot connect: {} is not set", name), fmt::format("{}, as {} is", name, names_.sign));
    if (*value < 0) refuse(fmt::format("{}={}", name, *value), "a number from 0 on");
    return static_cast<std::size_t>(*value);
  }

  std::string job() const {
    if (const auto given = environment_.text("BALLAST_JOB")) return *given;
    std::string job;
    for (const std::string& name : names_.job) {
      if (!job.empty()) job += '.';
      job += environment_.text(name).value_or("");
    }
    return job;
  }

  std::string address(std::size_t size) const {
    if (const auto given = environment_.text("MASTER_ADDR")) return *given;
    if (size == on_this_machine() || names_.launcher == "RANK") return std::string(loopback);
    if (names_.launcher == "Slurm") return first_host();
    refuse("cannot connect: MASTER_ADDR is not set, and not all ranks are on one machine",
           "the address of the machine of rank 0");
  }

  std::size_t on_this_machine() const {
    if (names_.launcher == "Open MPI") {
      return static_cast<std::size_t>(environment_.integer(names_.local_size).value_or(0));
    }
    if (names_.launcher == "Slurm" && environment_.integer("SLURM_STEP_NUM_NODES").value_or(0) == 1)
      return number(names_.size);
    return 0;
  }

  // "node[07-12,3],other" is a list that begins with node07, where Slurm puts the first rank.
  std::string first_host() const {
    const auto list = environment_.text("SLURM_STEP_NODELIST");
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

  std::optional<std::int64_t> checked_port(const std::string& name) const {
    const auto port = environment_.integer(name);
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

// 0: the hosts that there are.
std::size_t ranks_per_host_of(const ConnectOptions& options, const Environment& environment) {
  constexpr std::string_view needed = "ranks that count as one host, at least 1";
  if (options.ranks_per_host) {
    require(*options.ranks_per_host > 0, Code::bad_argument, [&] {
      return Problem{.what = "cannot connect with 0 ranks for each host", .needed = std::string(needed)};
    });
    return *options.ranks_per_host;
  }
  const auto given = environment.integer("BALLAST_RANKS_PER_HOST");
  require(!given || *given > 0, Code::bad_environment, [&] {
    return Problem{.what = fmt::format("cannot use BALLAST_RANKS_PER_HOST={}", *given), .needed = std::string(needed)};
  });
  return static_cast<std::size_t>(given.value_or(0));
}

std::string secret_of(const Environment& environment) {
  constexpr std::size_t fewest = 16;  // letters: a shorter one can be found by trying
  std::string secret = environment.text("BALLAST_SECRET").value_or("");
  require(secret.empty() || secret.size() >= fewest, Code::bad_environment, [&] {
    return Problem{.what = "cannot use BALLAST_SECRET: it is too short",
                   .needed = fmt::format("at least {} letters that cannot be predicted", fewest),
                   .available = fmt::format("{}", secret.size()),
                   .remedy = "Set it to the output of `openssl rand -hex 32`, the same on all ranks."};
  });
  return secret;
}

std::unique_ptr<Transport> transport_of_host(const ProcessGroup& group, const TransportSetup& setup) {
  if (setup.transport == HostTransport::gloo) return gloo_transport(group, setup);
  try {
    return shared_memory_transport(group, setup);
  } catch (const Error& error) {
    if (setup.transport != HostTransport::fastest || error.code() != Code::no_transport) throw;
    if (setup.log != nullptr) {
      setup.log->write_once(Level::info, "Gloo", "ranks exchange data through Gloo: " + error.problem().what);
    }
    return gloo_transport(group, setup);
  }
}

std::unique_ptr<Communicator> connect(const ConnectOptions& options, const ConnectParts& parts,
                                      std::shared_ptr<void> owned) {
  const Launch launch = options.launch ? *options.launch : launch_from(parts.environment);
  if (launch.size == 1) return lone_communicator(parts.backend, std::move(owned));
  const auto job = std::make_shared<Job>(
      JobOptions{launch, options.store, secret_of(parts.environment), timeout_of(options, parts.environment),
                 ranks_per_host_of(options, parts.environment), has_other_hosts(launch, parts.environment)});
  if (job->is_open() && options.log != nullptr && launch.rank == 0) {
    options.log->warning(
        "any process that can reach rank 0 can join this job: set BALLAST_SECRET to the same unpredictable text on all ranks");
  }
  const TransportSetup setup{options.transport, options.log, &parts.accounts, std::make_shared<SharedPages>()};
  return make_collectives(make_transport(ProcessGroup(job, launch.rank), setup), parts.backend, std::move(owned));
}

// The parts of a communicator whose caller has none.
struct OwnParts {
  explicit OwnParts(int threads) : backend(kernels::cpu_backend({.threads = threads})) {}

  std::unique_ptr<kernels::Backend> backend;
  MemoryAccounts accounts;
};

}  // namespace

std::unique_ptr<Transport> make_transport(const ProcessGroup& group, const TransportSetup& setup) {
  if (setup.stream && setup.stream->from_host) return shared_memory_transport(group, setup);
  std::unique_ptr<Transport> host = transport_of_host(group, setup);
  return setup.stream ? nccl_transport(std::move(host), group, setup) : std::move(host);
}

Launch launch_from(const Environment& environment, std::size_t times_before) {
  const auto present =
      std::ranges::find_if(launchers(), [&](const Names& names) { return environment.text(names.sign).has_value(); });
  if (present == launchers().end()) return {};
  return Reader(environment, *present, times_before).read();
}

bool has_other_hosts(const Launch& launch, const Environment& environment) {
  const auto names = std::ranges::find(launchers(), launch.launcher, &Names::launcher);
  if (names == launchers().end()) return false;
  if (names->local_size.empty()) return environment.integer("SLURM_STEP_NUM_NODES").value_or(1) > 1;
  const auto here = environment.integer(names->local_size);
  return here && *here > 0 && static_cast<std::size_t>(*here) < launch.size;
}

std::chrono::milliseconds timeout_of(const ConnectOptions& options, const Environment& environment) {
  if (options.timeout) return std::min(*options.timeout, longest_timeout);
  const auto seconds = environment.integer("BALLAST_TIMEOUT");
  require(!seconds || *seconds > 0, Code::bad_environment, [&] {
    return Problem{.what = fmt::format("cannot use BALLAST_TIMEOUT={}", *seconds), .needed = "seconds, at least 1"};
  });
  if (!seconds) return default_timeout;
  return *seconds < longest_timeout / std::chrono::seconds(1) ? std::chrono::seconds(*seconds) : longest_timeout;
}

std::unique_ptr<Communicator> connect(const ConnectOptions& options, const ConnectParts& parts) {
  return connect(options, parts, nullptr);
}

std::unique_ptr<Communicator> connect(const ConnectOptions& options) {
  const auto own = std::make_shared<OwnParts>(options.threads);
  return connect(options, {.backend = *own->backend, .accounts = own->accounts}, own);
}

int run_ranks(std::size_t threads, const std::function<void(Communicator& world)>& train,
              const ConnectOptions& options) {
  std::once_flag first;
  std::atomic<int> status = 0;
  const auto report = [&](const std::string& error) {
    status = 1;
    Log to_stderr;
    std::call_once(first, [&] { (options.log != nullptr ? *options.log : to_stderr).error(error); });
  };
  const auto end = [&](Communicator& world, const std::string& error) {
    report(world.size() > 1 ? fmt::format("rank {}: {}", world.rank(), error) : error);
    world.abort(error);
  };
  const auto as_rank = [&](Communicator& world) {
    try {
      train(world);
    } catch (const std::exception& error) {
      end(world, error.what());
    } catch (...) {
      end(world, "an exception that is no std::exception");
    }
  };
  try {
    if (options.launch.value_or(launch_from(Environment())).size > 1) {
      as_rank(*connect(options));
      return status;
    }
    const auto ranks = thread_ranks(threads, options.ranks_per_host.value_or(1));
    std::vector<std::jthread> others;
    for (std::size_t rank = 1; rank < threads; ++rank)
      others.emplace_back(as_rank, std::ref(*ranks[rank]));
    as_rank(*ranks.front());
  } catch (const std::exception& error) {
    report(error.what());
  }
  return status;
}

}  // namespace ballast
