// Columns that the rows of a strip share are gathered into tiles.
// RUN: gossamer-opt %s -p 'expose-storage,lower-amxcolumns,canonicalize,cse' --split-input-file | filecheck %s

// CHECK-LABEL: func.func private @region_tile32(
// CHECK-SAME:    %{{[a-z0-9]*}}: memref<?x64xbf16>, %{{[a-z0-9]*}}: memref<?xi32>, %[[CRD:[a-z0-9]*]]: memref<?xi32>, %[[VAL:[a-z0-9]*]]: memref<?xbf16>,
// CHECK:         %[[TILES:[a-z0-9_]*]] = memref.alloca() {alignment = 64 : i64} : memref<2x16x32xbf16>
// CHECK:         %[[SUMS:[a-z0-9_]*]] = memref.view %{{.*}} : memref<?xi8> to memref<32x32xf32>
// CHECK:         %[[PACKED:[a-z0-9_]*]] = memref.view %{{.*}} : memref<?xi8> to memref<64x32xbf16>

// Two columns of 32 tokens become a line of each tile. The weight is the left tile.
// CHECK:         scf.for %[[PANEL:[a-z0-9]*]] = %{{[a-z0-9]*}} to %{{[a-z0-9]*}} step %c1 iter_args(%[[S0:[a-z0-9]*]] = %{{[a-z0-9_]*}}, %[[S1:[a-z0-9]*]] = %{{[a-z0-9_]*}},
// CHECK:           scf.for %[[PAIR:[a-z0-9]*]] = %c0 to %c16 step %c1 {
// CHECK-COUNT-2:     memref.load %[[CRD]]
// CHECK:             vector.shuffle
// CHECK:             vector.store %{{.*}}, %[[TILES]][%c0, %[[PAIR]], %c0]
// CHECK:             vector.store %{{.*}}, %[[TILES]][%c1, %[[PAIR]], %c0]
// CHECK:           %[[X0:[a-z0-9]*]] = x86.amx.tile_load %[[TILES]][%c0, %c0, %c0]
// CHECK:           %[[X1:[a-z0-9]*]] = x86.amx.tile_load %[[TILES]][%c1, %c0, %c0]
// CHECK:           %[[W0:[a-z0-9]*]] = x86.amx.tile_load %[[VAL]]
// CHECK-NEXT:      x86.amx.tile_mulf %[[W0]], %[[X0]], %[[S0]]
// CHECK-NEXT:      x86.amx.tile_mulf %[[W0]], %[[X1]], %[[S1]]
// CHECK-COUNT-2:   x86.amx.tile_mulf
// CHECK-COUNT-4: x86.amx.tile_store %[[SUMS]]
// CHECK-LABEL: func.func private @region_tile16(
func.func @region(%x: tensor<?x64xbf16>, %w: tensor<40x64xbf16, "panels(reduction=1, rows=32, width=1)">, %bias: tensor<40xbf16>) -> tensor<?x40xbf16> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    %b = "kernel.read"(%bias) {map = affine_map<(t, m) -> (m)>} : (tensor<40xbf16>) -> bf16
    %wide = arith.extf %b : bf16 to f32
    %0 = arith.addf %sum, %wide : f32
    %1 = arith.truncf %0 : f32 to bf16
    "kernel.yield"(%1) : (bf16) -> ()
  }) {lanes = 16 : i64, reduction = 1 : i64, schedule = "amxcolumns", tile = [32]} : (tensor<?x64xbf16>, tensor<40x64xbf16, "panels(reduction=1, rows=32, width=1)">) -> tensor<?x40xbf16>
  return %y : tensor<?x40xbf16>
}

// -----

// Columns that come two by two are lines of x already; 32 neighbours are a tile of it.
// CHECK-LABEL: func.func private @twos_tile32(
// CHECK:         %[[TILES:[a-z0-9_]*]] = memref.alloca() {alignment = 64 : i64} : memref<2x16x32xbf16>
// CHECK:         %[[PACKED:[a-z0-9_]*]] = memref.view %{{.*}} : memref<?xi8> to memref<32x64xbf16>
// CHECK:           scf.for %[[PAIR:[a-z0-9]*]] = %c0 to %c16 step %c1 {
// CHECK-NOT:         vector.shuffle
// CHECK:             %[[LINE:.*]] = vector.load %[[PACKED]][%{{.*}}, %c0]
// CHECK:             vector.store %[[LINE]], %[[TILES]][%c0, %[[PAIR]], %c0]
// CHECK:           x86.amx.tile_load %[[TILES]][%c0, %c0, %c0]
func.func @twos(%x: tensor<?x64xbf16>, %w: tensor<64x64xbf16, "panels(reduction=1, rows=32, width=2)">) -> tensor<?x64xbf16> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    %1 = arith.truncf %sum : f32 to bf16
    "kernel.yield"(%1) : (bf16) -> ()
  }) {lanes = 16 : i64, reduction = 1 : i64, schedule = "amxcolumns", tile = [32]} : (tensor<?x64xbf16>, tensor<64x64xbf16, "panels(reduction=1, rows=32, width=2)">) -> tensor<?x64xbf16>
  return %y : tensor<?x64xbf16>
}

// -----

// CHECK-LABEL: func.func private @blocks_tile32(
// CHECK-NOT:     memref.alloca
// CHECK:         %[[PACKED:[a-z0-9_]*]] = memref.view %{{.*}} : memref<?xi8> to memref<32x64xbf16>
// CHECK:           %[[C:.*]] = memref.load
// CHECK:           %[[AT:.*]] = arith.muli %{{.*}}, %c16
// CHECK:           x86.amx.tile_load %[[PACKED]][%[[AT]], %c0]
// CHECK:           x86.amx.tile_load %[[PACKED]][%[[AT]], %c32]
func.func @blocks(%x: tensor<?x64xbf16>, %w: tensor<64x64xbf16, "panels(reduction=1, rows=32, width=32)">) -> tensor<?x64xbf16> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    %1 = arith.truncf %sum : f32 to bf16
    "kernel.yield"(%1) : (bf16) -> ()
  }) {lanes = 16 : i64, reduction = 1 : i64, schedule = "amxcolumns", tile = [32]} : (tensor<?x64xbf16>, tensor<64x64xbf16, "panels(reduction=1, rows=32, width=32)">) -> tensor<?x64xbf16>
  return %y : tensor<?x64xbf16>
}
