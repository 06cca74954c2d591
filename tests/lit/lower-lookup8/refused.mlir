// Only a chain stores rows in any order.
// RUN: gossamer-opt %s -p 'expose-storage,lower-lookup8' --split-input-file --verify-diagnostics

// expected-error @unknown {{only a chain stores rows in any order}}
func.func @region(%x: tensor<?x70xi8>, %w: tensor<40x70xi8, "bytewindows(reduction=1, rows=16, sorted=1)">) -> tensor<?x40xf32> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: i32):
    %0 = arith.sitofp %sum : i32 to f32
    "kernel.yield"(%0) : (f32) -> ()
  }) {lanes = 16 : i64, reduction = 1 : i64, schedule = "lookup8", tile = [32, 32]} : (tensor<?x70xi8>, tensor<40x70xi8, "bytewindows(reduction=1, rows=16, sorted=1)">) -> tensor<?x40xf32>
  return %y : tensor<?x40xf32>
}
