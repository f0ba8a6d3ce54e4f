#include "zero/comm/call.h"

#include <ballast/error.h>

#include <fmt/format.h>

namespace ballast {
namespace {

constexpr std::string_view name(Collective kind) {
  constexpr std::string_view names[] = {"all_gather", "reduce_scatter", "all_reduce", "all_reduce of integers",
                                        "broadcast",  "barrier",        "split",      "exchange of parts"};
  return names[static_cast<std::size_t>(kind)];
}

constexpr std::string_view text(Purpose purpose) {
  constexpr std::string_view texts[] = {"", " for the decision of a step", " for an off-plan use"};
  return texts[static_cast<std::size_t>(purpose)];
}

std::string text_of_values(const Call& call) {
  switch (call.kind) {
    case Collective::barrier:
    case Collective::exchange:
    case Collective::split: return std::string(name(call.kind));
    case Collective::sum: return fmt::format("{}{}, {} of them", name(call.kind), text(call.purpose), call.count);
    case Collective::broadcast:
      return fmt::format("{} of {} {} from rank {}", name(call.kind), call.count, name(call.dtype), call.root);
    case Collective::all_gather: return fmt::format("{} of {} {}", name(call.kind), call.count, name(call.dtype));
    case Collective::reduce_scatter:
    case Collective::all_reduce:
      return fmt::format("{} of {} {} in {}", name(call.kind), call.count, name(call.dtype), name(call.sum));
  }
  return {};
}

int bits_of(kernels::CodeBits bits) { return bits == kernels::CodeBits::eight ? 8 : 4; }

}  // namespace

std::string text(const Call& call) {
  if (!call.is_encoded) return text_of_values(call);
  const std::string values = fmt::format("{}, sent as int{}", text_of_values(call), bits_of(call.values));
  return call.kind == Collective::all_gather ? values : fmt::format("{} and int{}", values, bits_of(call.sums));
}

void require_same(const Call& ours, const Call& theirs, std::string_view peer) {
  require(ours == theirs, Code::wrong_size, [&] {
    return Problem{.what = fmt::format("{} makes another call than this rank", peer),
                   .needed = text(ours),
                   .available = text(theirs),
                   .remedy = "Make the same calls with the same sizes, in the same order, on all ranks."};
  });
}

}  // namespace ballast
