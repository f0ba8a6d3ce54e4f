// The channels of a mesh of ranks: each lane that communicates has its own.
#pragma once

#include <memory>

#include "zero/comm/communicator.h"
#include "zero/plan/placement.h"

namespace ballast {

// Neighbouring ranks share a copy of the state; ranks of the same place in their groups hold the same shard.
struct Mesh {
  std::unique_ptr<Communicator> gather;    // over the shard group
  std::unique_ptr<Communicator> reduce;    // the same, for another lane
  std::unique_ptr<Communicator> replicas;  // for that lane too
  Communicator* norm = nullptr;            // of the mesh's owner: ranks that have other parts of the same model

  std::size_t ranks() const { return reduce->size() * replicas->size(); }
  std::size_t rank() const { return replicas->rank() * reduce->size() + reduce->rank(); }
  void barrier();           // of all ranks
  bool is_any(bool is_so);  // whether it is so on any rank; all ask together
  void abort(std::string_view reason);
};

class GpuLanes;

// All ranks of `world` together: shards * replicas of them. On a GPU the groups' work goes into its lanes' streams.
Mesh make_mesh(Communicator& world, const Placement& placement, const GpuLanes* gpu = nullptr);

}  // namespace ballast
