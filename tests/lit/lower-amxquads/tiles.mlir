// Blocks of int8 on AMX's tiles: the quads of columns that a strip of rows shares are gathered.
// RUN: gossamer-opt %s -p 'expose-storage,lower-amxquads,canonicalize,cse' --split-input-file | filecheck %s

// CHECK-LABEL: func.func private @region_tile32(
// CHECK-SAME:    %{{[a-z0-9]*}}: memref<?x64xi8>, %{{[a-z0-9]*}}: memref<?xi32>, %[[CRD:[a-z0-9]*]]: memref<?xi32>, %[[VAL:[a-z0-9]*]]: memref<?xi8>,
// CHECK-DAG:     %[[HIGH:.*]] = arith.constant dense<-128> : vector<64xi8>
// CHECK:         %[[TILES:[a-z0-9_]*]] = memref.alloca() {alignment = 64 : i64} : memref<2x16x64xi8>
// CHECK:         %[[SUMS:[a-z0-9_]*]] = memref.view %{{.*}} : memref<?xi8> to memref<32x32xi32>
// CHECK:         %[[PACKED:[a-z0-9_]*]] = memref.view %{{.*}} : memref<?xi8> to memref<16x128xi8>

// A line of 16 tokens has four columns of each. What was added to x when it was packed is taken away.
// CHECK:         scf.for %[[PANEL:[a-z0-9]*]] = %{{[a-z0-9]*}} to %{{[a-z0-9]*}} step %c1 iter_args(%[[S0:[a-z0-9]*]] = %{{[a-z0-9_]*}}, %[[S1:[a-z0-9]*]] = %{{[a-z0-9_]*}},
// CHECK:           scf.for %[[LINE:[a-z0-9]*]] = %c0 to %c16 step %c1 {
// CHECK:             memref.load %[[CRD]]
// CHECK-COUNT-2:     vector.load %[[PACKED]]
// CHECK:             %[[FIRST:.*]] = arith.xori %{{.*}}, %[[HIGH]] : vector<64xi8>
// CHECK:             vector.store %[[FIRST]], %[[TILES]][%c0, %[[LINE]], %c0]
// CHECK:             vector.store %{{.*}}, %[[TILES]][%c1, %[[LINE]], %c0]
// CHECK:           %[[X0:[a-z0-9]*]] = x86.amx.tile_load %[[TILES]][%c0, %c0, %c0]
// CHECK:           %[[X1:[a-z0-9]*]] = x86.amx.tile_load %[[TILES]][%c1, %c0, %c0]
// CHECK:           %[[W0:[a-z0-9]*]] = x86.amx.tile_load %[[VAL]]
// CHECK-NEXT:      x86.amx.tile_muli %[[W0]], %[[X0]], %[[S0]]
// CHECK-NEXT:      x86.amx.tile_muli %[[W0]], %[[X1]], %[[S1]]
// CHECK-COUNT-2:   x86.amx.tile_muli
// CHECK-COUNT-4: x86.amx.tile_store %[[SUMS]]
// CHECK:         arith.sitofp %{{.*}} : vector<16xi32> to vector<16xf32>
func.func @region(%x: tensor<?x64xi8>, %w: tensor<64x64xi8, "panels(reduction=1, rows=32, width=4)">, %scale: tensor<64xf32>) -> tensor<?x64xf32> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: i32):
    %s = "kernel.read"(%scale) {map = affine_map<(t, m) -> (m)>} : (tensor<64xf32>) -> f32
    %0 = arith.sitofp %sum : i32 to f32
    %1 = arith.mulf %0, %s : f32
    "kernel.yield"(%1) : (f32) -> ()
  }) {lanes = 16 : i64, reduction = 1 : i64, schedule = "amxquads", tile = [32]} : (tensor<?x64xi8>, tensor<64x64xi8, "panels(reduction=1, rows=32, width=4)">) -> tensor<?x64xf32>
  return %y : tensor<?x64xf32>
}

// -----

// Of 64 neighbours a coordinate is enough.
// CHECK-LABEL: func.func private @wide_tile32(
// CHECK:           scf.for %[[LINE:[a-z0-9]*]] = %c0 to %c16 step %c1 {
// CHECK:             %[[FIRST:.*]] = arith.muli %{{.*}}, %c16
// CHECK:             arith.addi %[[FIRST]], %[[LINE]]
// CHECK-COUNT-2:   x86.amx.tile_muli
func.func @wide(%x: tensor<?x128xi8>, %w: tensor<16x128xi8, "panels(reduction=1, rows=16, width=64)">) -> tensor<?x16xf32> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: i32):
    %0 = arith.sitofp %sum : i32 to f32
    "kernel.yield"(%0) : (f32) -> ()
  }) {lanes = 16 : i64, reduction = 1 : i64, schedule = "amxquads", tile = [32]} : (tensor<?x128xi8>, tensor<16x128xi8, "panels(reduction=1, rows=16, width=64)">) -> tensor<?x16xf32>
  return %y : tensor<?x16xf32>
}
