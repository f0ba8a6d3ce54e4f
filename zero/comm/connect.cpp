#include "zero/comm/connect.h"

#include <ballast/error.h>

#include <fmt/format.h>

#include "zero/comm/collectives.h"
#include "zero/comm/gloo_transport.h"
#include "zero/comm/launch.h"
#include "zero/comm/nccl_transport.h"
#include "zero/comm/shared_memory_transport.h"
#include "zero/comm/thread_communicator.h"

namespace ballast {
namespace {

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

// What all transports of a job are made with.
struct Materials {
  HostTransport transport;
  Log* log;
  MemoryAccounts& accounts;
  std::shared_ptr<SharedPages> pages = std::make_shared<SharedPages>();
};

std::unique_ptr<Transport> make_transport(const ProcessGroup& group, const Materials& materials,
                                          const std::optional<GpuStream>& gpu);

// Returns the maker of transports for groups that are split off. Without a stream of their own they use that of this
// group.
MakeTransport maker(const Materials& materials, const std::optional<GpuStream>& gpu) {
  return [materials, gpu](const ProcessGroup& part, const std::optional<GpuStream>& own) {
    return make_transport(part, materials, own ? own : gpu);
  };
}

std::unique_ptr<Transport> transport_of_host(const ProcessGroup& group, const Materials& materials) {
  const MakeTransport make = maker(materials, std::nullopt);
  if (materials.transport == HostTransport::gloo) return gloo_transport(group, materials.accounts, make);
  try {
    return shared_memory_transport(group, materials.pages, materials.accounts, make);
  } catch (const Error& error) {
    if (materials.transport != HostTransport::fastest || error.code() != Code::no_transport) throw;
    if (materials.log != nullptr) {
      materials.log->write_once(Level::info, "Gloo", "ranks exchange data through Gloo: " + error.problem().what);
    }
    return gloo_transport(group, materials.accounts, make);
  }
}

std::unique_ptr<Transport> make_transport(const ProcessGroup& group, const Materials& materials,
                                          const std::optional<GpuStream>& gpu) {
  std::unique_ptr<Transport> host = transport_of_host(group, materials);
  if (!gpu) return host;
  return nccl_transport(std::move(host), group, *gpu, materials.accounts, maker(materials, gpu));
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
  const Materials materials{options.transport, options.log, parts.accounts};
  return make_collectives(make_transport(ProcessGroup(job, launch.rank), materials, std::nullopt), parts.backend,
                          std::move(owned));
}

// The parts of a communicator whose caller has none.
struct OwnParts {
  explicit OwnParts(int threads) : backend(kernels::cpu_backend({.threads = threads})) {}

  std::unique_ptr<kernels::Backend> backend;
  MemoryAccounts accounts;
};

}  // namespace

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

}  // namespace ballast
