// What the importer notes about density and tokens goes; everything else stays, and regions that differ in it are alike.
// RUN: gossamer-opt %s -p forget-hints --split-input-file | filecheck %s

// CHECK-LABEL: func.func @region(%arg0: tensor<?x8xf32>, %arg1: tensor<4x8xf32, #sparse>) -> tensor<4x8xf32, #sparse> {
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
func.func @region(%x: tensor<?x8xf32>, %w: tensor<4x8xf32, #CSR> {kernel.density = 0.1 : f64}) -> tensor<4x8xf32, #CSR>
    attributes {kernel.tokens = 128 : i64} {
  return %w : tensor<4x8xf32, #CSR>
}

// -----

// A private function has no hints of ours.
// CHECK-LABEL: func.func private @other(%arg0: tensor<4xf32> {kernel.density = 1.000000e-01 : f64})
func.func private @other(%w: tensor<4xf32> {kernel.density = 0.1 : f64}) {
  return
}

// -----

// Nothing to forget.
// CHECK-LABEL: func.func @plain(%arg0: tensor<4xf32>) -> tensor<4xf32>
func.func @plain(%w: tensor<4xf32>) -> tensor<4xf32> {
  return %w : tensor<4xf32>
}
