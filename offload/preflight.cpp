#include "offload/preflight.h"

#include "kernels/runtime/host_pages.h"
#include "offload/file.h"

namespace ballast::offload {
namespace {

using Clock = std::chrono::steady_clock;

// A file whose requests go through the queue at full speed.
class Runway {
 public:
  Runway(const std::filesystem::path& directory, IoQueue& queue, const Probe& probe)
      : queue_(&queue),
        requests_(std::max<std::size_t>(2, probe.bytes / probe.request_bytes)),
        request_bytes_(probe.request_bytes),
        memory_(map_host_pages(requests_ * request_bytes_, "preflight")),
        file_(File::nameless(directory, probe.file)) {
    std::fill_n(memory_.get(), requests_ * request_bytes_, std::byte{0x5a});  // because a drive may not store zeros
  }

  // Returns the bytes per second of all requests; kind_of() chooses the kind of each.
  template <class KindOf>
  double run(KindOf kind_of) {
    const auto start = Clock::now();
    InFlight requests;
    for (std::size_t i = 0; i < requests_; ++i) {
      const std::size_t first = i * request_bytes_;
      requests.add(queue_->submit({kind_of(i), &file_, first, {memory_.get() + first, request_bytes_}}));
    }
    requests.wait();
    queue_->submit({IoKind::flush, &file_, 0, {}}).wait();
    const std::chrono::duration<double> took = Clock::now() - start;
    return static_cast<double>(requests_ * request_bytes_) / took.count();
  }

  const File& file() const { return file_; }

 private:
  IoQueue* queue_;
  std::size_t requests_;
  std::size_t request_bytes_;
  HostPages memory_;
  File file_;
};

}  // namespace

DriveReport inspect(const std::filesystem::path& directory, IoQueue& queue, const Probe& probe) {
  Runway runway(directory, queue, probe);
  const FileSystem found = file_system_of(directory);
  DriveReport report{.directory = directory,
                     .file_system = found.name,
                     .is_network = found.network,
                     .free_bytes = std::filesystem::space(directory).available,
                     .buffered_because = runway.file().buffered_because(),
                     .queue = std::string(queue.kind())};
  runway.run([](std::size_t) { return IoKind::write; });  // allocates the file's extents
  report.write_bytes_per_second = runway.run([](std::size_t) { return IoKind::write; });
  report.read_bytes_per_second = runway.run([](std::size_t) { return IoKind::read; });
  report.both_bytes_per_second = runway.run([](std::size_t i) { return i % 2 == 0 ? IoKind::read : IoKind::write; });
  return report;
}

}  // namespace ballast::offload
