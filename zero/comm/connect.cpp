#include "zero/comm/connect.h"

#include <fmt/format.h>

#include "kernels/runtime/error.h"
#include "zero/comm/collectives.h"
#include "zero/comm/gloo_transport.h"
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

std::unique_ptr<Transport> make_transport(const ProcessGroup& group, const ConnectOptions& options, const Pages& pages);

MakeTransport maker(const ConnectOptions& options, const Pages& pages) {
  return [options, pages](const ProcessGroup& part, std::optional<StreamHandle> stream) {
    ConnectOptions part_options = options;
    if (stream) part_options.place.stream = *stream;
    return make_transport(part, part_options, pages);
  };
}

std::unique_ptr<Transport> fastest_on_cpus(const ProcessGroup& group, const ConnectOptions& options,
                                           const Pages& pages) {
  try {
    return shared_memory_transport(group, pages, options.accounts, maker(options, pages));
  } catch (const Error& error) {
    if (error.code() != Code::no_transport) throw;
    if (options.log != nullptr) {
      options.log->write_once(Level::info, "Gloo", "ranks exchange through Gloo: " + error.problem().what);
    }
    return gloo_transport(group, options.accounts, maker(options, pages));
  }
}

std::unique_ptr<Transport> make_transport(const ProcessGroup& group, const ConnectOptions& options,
                                          const Pages& pages) {
  const MakeTransport make = maker(options, pages);
  switch (options.way) {
    case Way::fastest: return fastest_on_cpus(group, options, pages);
    case Way::shared_memory: return shared_memory_transport(group, pages, options.accounts, make);
    case Way::gloo: return gloo_transport(group, options.accounts, make);
    case Way::nccl:
      return nccl_transport(fastest_on_cpus(group, options, pages), group, options.place, options.accounts, make);
  }
  fail(Code::internal, {.what = "there is no such way"});
}

}  // namespace

std::unique_ptr<Communicator> connect(const ConnectOptions& options) {
  const Launch launch = options.launch ? *options.launch : launch_from(options.environment);
  if (launch.size == 1) return lone_communicator(options.backend);
  const auto job = std::make_shared<Job>(JobOptions{launch, options.store, timeout_of(options)});
  const auto pages = std::make_shared<SharedPages>();
  return make_collectives(make_transport(ProcessGroup(job, launch.rank), options, pages), options.backend);
}

}  // namespace ballast
