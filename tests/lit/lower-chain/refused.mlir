// Chains that the lowering does not know.
// RUN: gossamer-opt %s -p expose-storage,lower-chain --split-input-file --verify-diagnostics

// A schedule whose inner loops do not work on the tiles of chains.
// expected-error @unknown {{no chain has a product of the schedule lookup, but of amxcolumns, amxexpand, amxquads, bf16dot, block, broadcast, lookup8, pairs, quads, rowpairs}}
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
func.func @schedule(%x: tensor<?x8xf32>, %w: tensor<8x8xf32, "rowpairs(reduction=1, width=16)">, %v: tensor<8x8xf32, #CSR>) -> tensor<?x8xf32> {
  %h = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {lanes = 8 : i64, reduction = 1 : i64, schedule = "rowpairs", tile = [32, 1024]} : (tensor<?x8xf32>, tensor<8x8xf32, "rowpairs(reduction=1, width=16)">) -> tensor<?x8xf32>
  %y = "kernel.spmm"(%h, %v) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {lanes = 8 : i64, reduction = 1 : i64, schedule = "lookup", tile = [4]} : (tensor<?x8xf32>, tensor<8x8xf32, #CSR>) -> tensor<?x8xf32>
  return %y : tensor<?x8xf32>
}

// -----

// A weight in another storage than its schedule has.
// expected-error @unknown {{is not stored as blocks}}
func.func @storage(%x: tensor<?x8xf32>, %w: tensor<8x8xf32, "rowpairs(reduction=1, width=16)">, %v: tensor<8x8xf32, "rowpairs(reduction=1, width=16)">) -> tensor<?x8xf32> {
  %h = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {lanes = 8 : i64, reduction = 1 : i64, schedule = "rowpairs", tile = [32, 1024]} : (tensor<?x8xf32>, tensor<8x8xf32, "rowpairs(reduction=1, width=16)">) -> tensor<?x8xf32>
  %y = "kernel.spmm"(%h, %v) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {lanes = 8 : i64, reduction = 1 : i64, schedule = "block", tile = [32, 64]} : (tensor<?x8xf32>, tensor<8x8xf32, "rowpairs(reduction=1, width=16)">) -> tensor<?x8xf32>
  return %y : tensor<?x8xf32>
}

// -----

// What is returned comes from no op of the chain.
// expected-error @unknown {{returns what none of its kernel ops computes}}
func.func @result(%x: tensor<?x8xf32>, %w: tensor<8x8xf32, "rowpairs(reduction=1, width=16)">, %v: tensor<8x8xf32, "rowpairs(reduction=1, width=16)">) -> tensor<?x8xf32> {
  %h = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {lanes = 8 : i64, reduction = 1 : i64, schedule = "rowpairs", tile = [32, 1024]} : (tensor<?x8xf32>, tensor<8x8xf32, "rowpairs(reduction=1, width=16)">) -> tensor<?x8xf32>
  %y = "kernel.spmm"(%h, %v) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {lanes = 8 : i64, reduction = 1 : i64, schedule = "rowpairs", tile = [32, 1024]} : (tensor<?x8xf32>, tensor<8x8xf32, "rowpairs(reduction=1, width=16)">) -> tensor<?x8xf32>
  return %x : tensor<?x8xf32>
}
