// A training over a communicator that a user of the library has written: it overrides only what the interface leaves open.
#include <ballast/comm.h>

#include <catch2/catch.hpp>

#include "tests/zero/training_rig.h"

using namespace ballast;
using namespace ballast::testing;

namespace {

class OwnCommunicator final : public Communicator {
 public:
  explicit OwnCommunicator(Communicator& inner) : inner_(inner) {}

  std::size_t rank() const override { return inner_.rank(); }
  std::size_t size() const override { return inner_.size(); }
  Allocator* shared_memory() override { return nullptr; }
  using Communicator::all_gather;
  using Communicator::all_reduce;
  using Communicator::reduce_scatter;
  void all_gather(ConstView mine, View all) override { inner_.all_gather(mine, all); }
  void reduce_scatter(ConstView all, View into) override { inner_.reduce_scatter(all, into); }
  void all_reduce(ConstView all, View into) override { inner_.all_reduce(all, into); }
  void all_reduce(std::span<std::int64_t> values) override { inner_.all_reduce(values); }
  void broadcast(View values, std::size_t root) override { inner_.broadcast(values, root); }
  void barrier() override { inner_.barrier(); }
  using Communicator::split;
  std::unique_ptr<Communicator> split(std::size_t color) override {
    return std::unique_ptr<Communicator>(new OwnCommunicator(inner_.split(color)));
  }
  void abort(std::string_view reason) override { inner_.abort(reason); }
  void leave(const LeaveReason& leave_reason) override { inner_.leave(leave_reason); }
  void set_activity(std::string_view activity) override { inner_.set_activity(activity); }

 private:
  explicit OwnCommunicator(std::unique_ptr<Communicator> owned) : owned_(std::move(owned)), inner_(*owned_) {}

  std::unique_ptr<Communicator> owned_{};
  Communicator& inner_;
};

}  // namespace

TEST_CASE("a training works with a communicator that overrides the pure functions alone") {
  for (const int stage : {1, 3}) {
    const Setup setup{.placement = placement_of_stage(stage, 2)};
    std::vector<Outcome> outcomes(2);
    const std::vector<std::string> failures = failures_of_ranks(2, [&](Communicator& world) {
      OwnCommunicator own(world);
      outcomes[world.rank()] = train_rank(setup, own);
    });
    REQUIRE(failures == std::vector<std::string>(2));
    check_same(train(setup), outcomes);
  }
}
