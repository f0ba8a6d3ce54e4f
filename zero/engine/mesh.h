// The communicators of a mesh of ranks. Each lane that communicates has its own, because a communicator belongs to one
// thread at a time.
#pragma once

#include <ballast/comm.h>
#include <ballast/placement.h>

#include <memory>
#include <vector>

namespace ballast {

// Neighbouring ranks share a copy of the state, or of the parameters. Ranks with the same position in their groups hold
// the same shard of it.
struct Mesh {
  std::unique_ptr<Communicator> gather;    // over the group of neighbours
  std::unique_ptr<Communicator> reduce;    // the same, for another lane
  std::unique_ptr<Communicator> replicas;  // over the ranks with the same position, for that lane too
  std::unique_ptr<Communicator> matrices;  // over all ranks that share the state; null: no rule needs whole matrices
  Communicator* norm = nullptr;            // over ranks with other parts of the model; belongs to the mesh's owner

  std::size_t ranks() const { return reduce->size() * replicas->size(); }
  std::size_t rank() const { return replicas->rank() * reduce->size() + reduce->rank(); }
  void barrier();                              // waits for all ranks
  std::vector<std::size_t> where(bool is_so);  // the ranks on which it is so; all ranks call together
  void abort(std::string_view reason);         // any thread
  SentBytes sent() const;                      // bytes sent in all its groups; any thread may call
};

class GpuLanes;

// Throws B1005 if Wire::across names another format than Wire::reduce, and no rank would send a sum of several ranks.
void check_across(const Wire& wire, const Mesh& mesh);

// Called by all ranks of `world`, which are placement.ranks(). On a GPU the groups' work goes into the lanes' streams.
Mesh make_mesh(Communicator& world, const Placement& placement, const GpuLanes* gpu = nullptr,
               bool needs_matrices = false);

}  // namespace ballast
