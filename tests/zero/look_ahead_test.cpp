// Trainings whose communicators ask which exchange comes next, and hold the engine to its answers: that exchange comes, and
// sends the bytes that were there when it was announced.
#include "zero/comm/call.h"

#include <atomic>
#include <catch2/catch.hpp>

#include "tests/comm/test_groups.h"
#include "tests/zero/forwarding_communicator.h"
#include "tests/zero/training_rig.h"

using namespace ballast;
using namespace ballast::testing;

namespace {

class AskingCommunicator final : public ForwardingCommunicator {
 public:
  AskingCommunicator(Communicator& inner, std::atomic<std::size_t>& announcements)
      : ForwardingCommunicator(inner), announcements_(announcements) {}

  using ForwardingCommunicator::all_gather;
  using ForwardingCommunicator::all_reduce;
  using ForwardingCommunicator::reduce_scatter;
  using ForwardingCommunicator::split;

  void use_look_ahead(LookAhead* of_caller) override { look_ahead_ = of_caller; }

  void all_gather(ConstView mine, View all) override {
    hold_to({.kind = Collective::all_gather, .sent = mine});
    ForwardingCommunicator::all_gather(mine, all);
  }
  void reduce_scatter(ConstView all, View into) override {
    hold_to({.kind = Collective::reduce_scatter, .sent = all, .count = into.count(), .sum = into.dtype()});
    ForwardingCommunicator::reduce_scatter(all, into);
  }
  void all_reduce(ConstView all, View into) override {
    expect(!announced_, "another collective came");
    ForwardingCommunicator::all_reduce(all, into);
  }
  void all_reduce(std::span<std::int64_t> values, Purpose purpose) override {
    expect(!announced_, "a sum of integers came");
    ForwardingCommunicator::all_reduce(values, purpose);
  }
  std::unique_ptr<Communicator> split(std::size_t color, const Channel* channel) override {
    return std::unique_ptr<Communicator>(new AskingCommunicator(part(color, channel), announcements_));
  }

 private:
  AskingCommunicator(std::unique_ptr<Communicator> owned, std::atomic<std::size_t>& announcements)
      : ForwardingCommunicator(std::move(owned)), announcements_(announcements) {}

  static std::vector<std::byte> bytes_of(const ConstView& view) {
    return {view.as_bytes().begin(), view.as_bytes().end()};
  }

  void hold_to(const NextCollective& now) {
    if (announced_) {
      const bool is_it = announced_->kind == now.kind && announced_->sent.data() == now.sent.data() &&
                         announced_->sent.count() == now.sent.count() && announced_->count == now.count &&
                         announced_->sum == now.sum;
      expect(is_it, "another exchange came than was announced");
      expect(bytes_of(now.sent) == bytes_, "an exchange sends other bytes than were there when it was announced");
    }
    announced_ = look_ahead_ == nullptr ? std::nullopt : look_ahead_->next();
    if (!announced_) return;
    bytes_ = bytes_of(announced_->sent);
    ++announcements_;
  }

  LookAhead* look_ahead_ = nullptr;
  std::optional<NextCollective> announced_{};
  std::vector<std::byte> bytes_{};
  std::atomic<std::size_t>& announcements_;
};

Placement on_host(Placement placement) {
  placement.state = Tier::host;
  return placement;
}

}  // namespace

TEST_CASE("an exchange that the engine announces comes next, with the bytes that it had then") {
  Placement mesh = placement_of_stage(3, 2), copies = placement_of_stage(3, 4);
  mesh.replicas = 2;
  copies.parameter_replicas = 2;
  const Setup setups[] = {
      {.placement = placement_of_stage(1, 2), .micro_steps = 2, .max_norm = 0.05},
      {.placement = placement_of_stage(2, 3), .micro_steps = 2, .schedule = {.overlap_gathers = true}},
      {.placement = placement_of_stage(3, 2), .micro_steps = 3, .schedule = {.prefetch = 2}},
      {.placement = on_host(placement_of_stage(3, 2)), .schedule = {.update_in_backward = true}, .offloads = true},
      {.placement = mesh, .micro_steps = 2, .gradient_format = GradientFormat::bf16},
      {.placement = copies, .micro_steps = 2}};
  std::atomic<std::size_t> announcements = 0;
  for (const Setup& setup : setups) {
    const std::size_t ranks = setup.placement.ranks();
    CAPTURE(ranks, setup.placement.shards, setup.placement.replicas, setup.placement.parameter_replicas);
    std::vector<Outcome> outcomes(ranks);
    const std::vector<std::string> failures = failures_of_ranks(ranks, [&](Communicator& world) {
      AskingCommunicator asking(world, announcements);
      outcomes[world.rank()] = train_rank(setup, asking);
    });
    REQUIRE(failures == std::vector<std::string>(ranks));
    check_same(train(setup), outcomes);
  }
  CHECK(announcements > 0);
}
