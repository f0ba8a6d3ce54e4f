#include <ballast/comm.h>

#include <ballast/error.h>

namespace ballast {
namespace {

[[noreturn]] void refuse_encoding() {
  fail(Code::unsupported, {.what = "cannot send codes: the communicator has no encoded collectives",
                           .needed = "Wire without formats, or a communicator of connect()"});
}

[[noreturn]] void refuse_parts() {
  fail(Code::unsupported, {.what = "cannot exchange parts of matrices: the communicator has no exchange()",
                           .needed = "a rule other than Muon, or a communicator of connect()"});
}

}  // namespace

void Communicator::all_gather(ConstView, View, const Encoding&) { refuse_encoding(); }
void Communicator::reduce_scatter(ConstView, View, const Encoding&) { refuse_encoding(); }
void Communicator::all_reduce(ConstView, View, const Encoding&) { refuse_encoding(); }

void Communicator::exchange(std::span<const SentPart>, std::span<const ReceivedPart>) { refuse_parts(); }

void Communicator::all_reduce(std::span<std::int64_t> values, Purpose) { all_reduce(values); }

std::unique_ptr<Communicator> Communicator::split(std::size_t color, const Channel* channel) {
  require(channel == nullptr, Code::unsupported, [] {
    return Problem{.what = "cannot make a group for a GPU: the communicator has none",
                   .needed = "a training on the CPU, or a communicator of connect()"};
  });
  return split(color);
}

}  // namespace ballast
