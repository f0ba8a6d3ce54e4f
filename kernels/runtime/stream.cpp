#include "kernels/runtime/stream.h"

#include <optional>

#include "kernels/runtime/device.h"

namespace ballast {
namespace {

// A null handle names the default stream of whichever GPU is current.
class OnItsGpu {
 public:
  explicit OnItsGpu(const Stream& stream) {
    if (stream.handle() == nullptr) current_.emplace(stream.gpu());
  }

 private:
  std::optional<CurrentGpu> current_;
};

}  // namespace

Stream::Stream(int gpu, Priority priority)
    : Stream(device::create_stream(gpu, priority == Priority::high), Destroy{}, gpu) {}

Stream Stream::wrap(StreamHandle handle, int gpu) {
  device::require_gpu(gpu);
  return Stream(handle, Destroy{.owned = false}, gpu);
}

void Stream::Destroy::operator()(StreamHandle stream) const noexcept {
  if (owned) {
    device::destroy(stream);
  }
}

void Stream::wait_for(const Event& event) const {
  const OnItsGpu current(*this);
  device::wait(handle(), event.handle());
}

bool Stream::is_done() const {
  const OnItsGpu current(*this);
  return device::is_done(handle());
}

void Stream::synchronize() const {
  const OnItsGpu current(*this);
  device::synchronize(handle());
}

Event::Event(int gpu, Timing timing) : handle_(device::create_event(gpu, timing == Timing::on)) {}

void Event::Destroy::operator()(EventHandle event) const noexcept { device::destroy(event); }

void Event::record(const Stream& stream) const {
  const OnItsGpu current(stream);
  device::record(handle(), stream.handle());
}
bool Event::is_done() const { return device::is_done(handle()); }
void Event::synchronize() const { device::synchronize(handle()); }
double Event::seconds_since(const Event& start) const { return device::seconds_between(start.handle(), handle()); }

void copy(void* to, const void* from, std::size_t bytes, const Stream& stream) {
  if (bytes > 0) {
    const OnItsGpu current(stream);
    device::copy(to, from, bytes, stream.handle());
  }
}

void fill(void* to, unsigned char value, std::size_t bytes, const Stream& stream) {
  if (bytes > 0) {
    const OnItsGpu current(stream);
    device::fill(to, value, bytes, stream.handle());
  }
}

}  // namespace ballast
