#include "zero/mesh.h"

#include <fmt/format.h>

#include "kernels/runtime/error.h"

namespace ballast {

Mesh make_mesh(Communicator& world, const Placement& placement) {
  require(world.size() == placement.shards * placement.replicas, Code::bad_argument, [&] {
    return Problem{.what = fmt::format("a mesh of {} x {} was asked for", placement.shards, placement.replicas),
                   .needed = fmt::format("{} ranks", placement.shards * placement.replicas),
                   .available = fmt::format("{} ranks", world.size())};
  });
  const std::size_t group = world.rank() / placement.shards;
  return {.gather = world.split(group),
          .reduce = world.split(group),
          .replicas = world.split(world.rank() % placement.shards)};
}

void Mesh::abort(std::string_view reason) {
  for (Communicator* communicator : {gather.get(), reduce.get(), replicas.get()}) {
    communicator->abort(reason);
  }
}

}  // namespace ballast
