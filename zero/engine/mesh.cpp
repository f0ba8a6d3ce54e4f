#include "zero/engine/mesh.h"

#include <ballast/error.h>

#include <fmt/format.h>

#include "zero/comm/call.h"
#include "zero/engine/lanes.h"

namespace ballast {

Mesh make_mesh(Communicator& world, const Placement& placement, const GpuLanes* gpu, bool needs_matrices) {
  require(world.size() == placement.ranks(), Code::bad_argument, [&] {
    return Problem{.what = fmt::format("cannot make a mesh of {} x {} ranks", placement.shards, placement.replicas),
                   .needed = fmt::format("{} ranks", placement.ranks()),
                   .available = fmt::format("{} ranks", world.size())};
  });
  const std::size_t group = world.rank() / placement.ranks_per_group();
  const auto split = [&](std::size_t color, Lane lane) {
    if (gpu == nullptr) return world.split(color);
    const Channel channel{{gpu->stream(lane).handle(), gpu->gpu(), lane == Lane::gather}, &gpu->backend(lane)};
    return world.split(color, &channel);
  };
  return {.gather = split(group, Lane::gather),
          .reduce = split(group, Lane::reduce),
          .replicas = split(world.rank() % placement.ranks_per_group(), Lane::reduce),
          .matrices =
              needs_matrices && placement.shards > 1 ? split(world.rank() / placement.shards, Lane::reduce) : nullptr};
}

void Mesh::barrier() {
  reduce->barrier();
  replicas->barrier();
}

std::vector<std::size_t> Mesh::where(bool is_so) {
  std::vector<std::int64_t> answers(ranks());
  answers[rank()] = is_so ? 1 : 0;
  reduce->all_reduce(answers);
  replicas->all_reduce(answers);
  std::vector<std::size_t> found;
  for (std::size_t each = 0; each < answers.size(); ++each) {
    if (answers[each] > 0) found.push_back(each);
  }
  return found;
}

void Mesh::abort(std::string_view reason) {
  for (Communicator* communicator : {gather.get(), reduce.get(), replicas.get(), matrices.get()}) {
    if (communicator != nullptr) communicator->abort(reason);
  }
  if (norm != nullptr) norm->abort(reason);
}

SentBytes Mesh::sent() const {
  return gather->sent() + reduce->sent() + replicas->sent() + (matrices ? matrices->sent() : SentBytes{});
}

void check_across(const Wire& wire, const Mesh& mesh) {
  const bool is_used = wire.sums() == wire.reduce || mesh.replicas->size() > 1 || mesh.reduce->ranks_per_host() > 1 ||
                       mesh.reduce->size() == 1;
  require(is_used, Code::unsupported, [&] {
    return Problem{.what = fmt::format("cannot send sums of several ranks as {}: ranks send their own gradients only, "
                                       "because there are not several hosts with several ranks each",
                                       name(wire.sums())),
                   .needed = "wire.across of the same format as wire.reduce, or none",
                   .remedy = fmt::format("Leave out across, or send gradients as {} with reduce.", name(wire.sums()))};
  });
}

}  // namespace ballast
