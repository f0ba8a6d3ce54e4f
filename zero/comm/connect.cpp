#include "zero/comm/connect.h"

#include <fmt/format.h>

#include "kernels/runtime/error.h"
#include "zero/comm/collectives.h"
#include "zero/comm/gloo_transport.h"
#include "zero/comm/nccl_transport.h"
#include "zero/comm/shared_memory_transport.h"
#include "zero/comm/thread_communicator.h"

namespace ballast {
namespace {

std::chrono::milliseconds timeout_of(const ConnectOptions& options) {
  if (options.timeout) return *options.timeout;
  const auto seconds = options.environment.integer("BALLAST_TIMEOUT");
  require(!seconds || *seconds > 0, Code::bad_environment, [&] {
    return Problem{.what = fmt::format("BALLAST_TIMEOUT={}", *seconds), .needed = "seconds, at least 1"};
  });
  return seconds ? std::chrono::seconds(*seconds) : default_timeout;
}

using Pages = std::shared_ptr<SharedPages>;

std::unique_ptr<Transport> make_transport(const ProcessGroup& group, const ConnectOptions& options, const Pages& pages,
                                          const std::optional<GpuStream>& gpu);

// Returns the maker of transports for groups that are split off. Without a stream of their own they use that of this
// group.
MakeTransport maker(const ConnectOptions& options, const Pages& pages, const std::optional<GpuStream>& gpu) {
  return [options, pages, gpu](const ProcessGroup& part, const std::optional<GpuStream>& own) {
    return make_transport(part, options, pages, own ? own : gpu);
  };
}

std::unique_ptr<Transport> transport_of_host(const ProcessGroup& group, const ConnectOptions& options,
                                             const Pages& pages) {
  const MakeTransport make = maker(options, pages, std::nullopt);
  if (options.transport == HostTransport::gloo) return gloo_transport(group, options.accounts, make);
  try {
    return shared_memory_transport(group, pages, options.accounts, make);
  } catch (const Error& error) {
    if (options.transport != HostTransport::fastest || error.code() != Code::no_transport) throw;
    if (options.log != nullptr) {
      options.log->write_once(Level::info, "Gloo", "ranks exchange data through Gloo: " + error.problem().what);
    }
    return gloo_transport(group, options.accounts, make);
  }
}

std::unique_ptr<Transport> make_transport(const ProcessGroup& group, const ConnectOptions& options, const Pages& pages,
                                          const std::optional<GpuStream>& gpu) {
  std::unique_ptr<Transport> host = transport_of_host(group, options, pages);
  if (!gpu) return host;
  return nccl_transport(std::move(host), group, *gpu, options.accounts, maker(options, pages, gpu));
}

}  // namespace

std::unique_ptr<Communicator> connect(const ConnectOptions& options) {
  const Launch launch = options.launch ? *options.launch : launch_from(options.environment);
  if (launch.size == 1) return lone_communicator(options.backend);
  const auto job = std::make_shared<Job>(JobOptions{launch, options.store, timeout_of(options)});
  const auto pages = std::make_shared<SharedPages>();
  return make_collectives(make_transport(ProcessGroup(job, launch.rank), options, pages, std::nullopt),
                          options.backend);
}

}  // namespace ballast
