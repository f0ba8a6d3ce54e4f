// The communicators of a mesh of ranks. Each lane that communicates has its own, because a communicator belongs to one
// thread at a time.
#pragma once

#include <ballast/comm.h>
#include <ballast/error.h>
#include <ballast/placement.h>

#include <fmt/format.h>

#include <array>
#include <memory>
#include <vector>

#include "zero/comm/call.h"
#include "zero/engine/lanes.h"

namespace ballast {

// Neighbouring ranks share a copy of the state, or of the parameters. Ranks with the same position in their groups hold
// the same shard of it.
struct Mesh {
  std::unique_ptr<Communicator> gather;    // over the group of neighbours
  std::unique_ptr<Communicator> reduce;    // the same, for another lane
  std::unique_ptr<Communicator> replicas;  // over the ranks with the same position, for that lane too
  std::unique_ptr<Communicator> matrices;  // over all ranks that share the state; null: no rule needs whole matrices
  std::unique_ptr<Communicator>
      upload;  // as `gather`, from host memory that the ranks share; null: none of it passes there
  std::unique_ptr<Communicator> host;  // as `reduce`, likewise
  // The ranks with the same part of units that have several, for the lanes of `gather` and `reduce`. Null: no unit has several.
  std::unique_ptr<Communicator> gather_part;
  std::unique_ptr<Communicator> reduce_part;
  Communicator* norm = nullptr;  // over ranks with other parts of the model; belongs to the mesh's owner

  std::size_t ranks() const { return reduce->size() * replicas->size(); }
  std::size_t rank() const { return replicas->rank() * reduce->size() + reduce->rank(); }

  void barrier() {  // waits for all ranks
    reduce->barrier();
    replicas->barrier();
  }

  std::vector<std::size_t> where(bool is_so) {  // the ranks on which it is so; all ranks call together
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

  void abort(std::string_view reason) {  // any thread
    for (Communicator* communicator : all()) {
      if (communicator != nullptr) communicator->abort(reason);
    }
    if (norm != nullptr) norm->abort(reason);
  }

  SentBytes sent() const {  // bytes sent in all its groups; any thread may call
    SentBytes bytes{};
    for (const Communicator* communicator : all())
      bytes = bytes + (communicator != nullptr ? communicator->sent() : SentBytes{});
    return bytes;
  }

 private:
  std::array<Communicator*, 8> all() const {
    return {gather.get(), reduce.get(), replicas.get(),    matrices.get(),
            upload.get(), host.get(),   gather_part.get(), reduce_part.get()};
  }
};

// Throws B1005 if Wire::across names another format than Wire::reduce, and no rank would send a sum of several ranks.
inline void check_across(const Wire& wire, const Mesh& mesh) {
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

// The groups that only some programs need.
struct MeshNeeds {
  bool matrices = false;
  bool host = false;
  std::size_t parts = 1;  // the most of a unit
};

// Called by all ranks of `world`, which are placement.ranks(). On a GPU the groups' work goes into the lanes' streams.
inline Mesh make_mesh(Communicator& world, const Placement& placement, const GpuLanes* gpu = nullptr,
                      const MeshNeeds& needs = {}) {
  require(world.size() == placement.ranks(), Code::bad_argument, [&] {
    return Problem{.what = fmt::format("cannot make a mesh of {} x {} ranks", placement.shards, placement.replicas),
                   .needed = fmt::format("{} ranks", placement.ranks()),
                   .available = fmt::format("{} ranks", world.size())};
  });
  const std::size_t group = world.rank() / placement.ranks_per_group();
  const auto split = [&](std::size_t color, Lane lane) {
    if (gpu == nullptr) return world.split(color);
    const Channel channel{{gpu->stream(lane).handle(), gpu->gpu(), lane == Lane::gather, lane == Lane::upload},
                          &gpu->backend(lane)};
    return world.split(color, &channel);
  };
  Mesh mesh;
  mesh.gather = split(group, Lane::gather);
  mesh.reduce = split(group, Lane::reduce);
  mesh.replicas = split(world.rank() % placement.ranks_per_group(), Lane::reduce);
  if (needs.matrices && placement.shards > 1) mesh.matrices = split(world.rank() / placement.shards, Lane::reduce);
  if (needs.host) {
    mesh.upload = split(group, Lane::upload);
    mesh.host = world.split(group);
  }
  if (needs.parts > 1) {
    mesh.gather_part = split(world.rank() % needs.parts, Lane::gather);
    mesh.reduce_part = split(world.rank() % needs.parts, Lane::reduce);
  }
  return mesh;
}

}  // namespace ballast
