// The memory behind the tensors has to be known.
// RUN: gossamer-opt %s -p lower-broadcast --verify-diagnostics

// expected-error @unknown {{its result has no buffer, for it is computed and used inside of the region, or expose-storage has not run}}
func.func @region(%x: tensor<?x30xf32>, %w: tensor<7x30xf32, "padded(reduction=1, columns=16)">) -> tensor<?x7xf32> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {lanes = 2 : i64, reduction = 1 : i64, schedule = "broadcast", tile = [4]} : (tensor<?x30xf32>, tensor<7x30xf32, "padded(reduction=1, columns=16)">) -> tensor<?x7xf32>
  return %y : tensor<?x7xf32>
}
