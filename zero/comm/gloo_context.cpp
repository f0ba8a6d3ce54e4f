#include "zero/comm/gloo_context.h"

#include <ballast/error.h>

#include <fcntl.h>
#include <fmt/format.h>
#include <gloo/transport/tcp/context.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/tcp/pair.h>
#include <sys/epoll.h>

#include <cerrno>
#include <mutex>
#include <system_error>
#include <utility>

#include "kernels/runtime/system_limits.h"

namespace ballast {
namespace {

namespace tcp = gloo::transport::tcp;

// The address of Gloo's device, which only says where a process listens, and none does.
constexpr const char* loopback = "127.0.0.1";

// One end of a connection that exists.
class Link : public tcp::Pair {
 public:
  Link(tcp::Context* context, tcp::Device* device, int rank, std::chrono::milliseconds timeout, Descriptor socket)
      : tcp::Pair(context, device, rank, timeout) {
    const std::lock_guard lock(m_);
    // Until 2023 the constructor of the base began to listen, on loopback. Gloo's thread skips news of that socket while the lock
    // is held, and finds nothing to read afterwards.
    const Descriptor listener(std::exchange(fd_, socket.release()));
    ::fcntl(fd_, F_SETFL, ::fcntl(fd_, F_GETFL) | O_NONBLOCK);
    device_->registerDescriptor(fd_, EPOLLIN, this);
    changeState(CONNECTED);
  }
};

class LinkContext : public tcp::Context {
 public:
  LinkContext(std::shared_ptr<tcp::Device> device, int own, int ranks) : tcp::Context(std::move(device), own, ranks) {}

  void add(int peer, Descriptor socket) {
    pairs_[static_cast<std::size_t>(peer)] =
        std::make_unique<Link>(this, device_.get(), peer, getTimeout(), std::move(socket));
  }
};

class LinkedContext : public gloo::Context {
 public:
  LinkedContext(int own, int ranks, std::shared_ptr<gloo::transport::Device> device,
                std::shared_ptr<gloo::transport::Context> links)
      : gloo::Context(own, ranks) {
    device_ = std::move(device);
    transportContext_ = std::move(links);
  }
};

std::unique_ptr<gloo::Context> linked_context(int own, std::vector<Descriptor> links,
                                              std::chrono::milliseconds timeout) {
  const auto size = static_cast<int>(links.size());
  const auto device = std::static_pointer_cast<tcp::Device>(tcp::CreateDevice(tcp::attr(loopback)));
  const auto context = std::make_shared<LinkContext>(device, own, size);
  context->setTimeout(timeout);
  for (int peer = 0; peer < size; ++peer) {
    if (peer != own) context->add(peer, std::move(links[static_cast<std::size_t>(peer)]));
  }
  return std::make_unique<LinkedContext>(own, size, device, context);
}

}  // namespace

void require_descriptors(std::string_view gloo_says) {
  if (gloo_says.find(std::generic_category().message(EMFILE)) == std::string_view::npos) return;
  fail(Code::system_limit, {.what = "Gloo cannot open a descriptor: " + std::generic_category().message(EMFILE),
                            .available = fmt::format("{}; Gloo says: {}", limits_behind(EMFILE), gloo_says)});
}

std::unique_ptr<gloo::Context> gloo_context(std::size_t rank, std::vector<Descriptor> links,
                                            std::chrono::milliseconds timeout) {
  try {
    return linked_context(static_cast<int>(rank), std::move(links), timeout);
  } catch (const std::system_error& refused) {
    fail_limit("cannot start a thread for Gloo", refused.code().value());
  } catch (const std::exception& failed) {
    require_descriptors(failed.what());
    fail(Code::no_transport, {.what = "cannot start Gloo", .available = failed.what()});
  }
}

}  // namespace ballast
